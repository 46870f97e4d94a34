"""Writes that are made only while their writer has a right to them, such as a lease.

On a file system a lock keeps others from taking the right between the check and the write. An object store has no
locks. There a file is replaced only if it is still the one that was there before the check, on a condition that S3,
Google Cloud Storage and Azure know: a writer that was stopped in between can't replace what its successor has written.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from urllib.parse import quote

import fsspec

_TRIES = 5
"""Most tries to replace a file that changes meanwhile."""
_STORES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""Stores that know conditions, by the protocols of their drivers: s3fs, gcsfs, adlfs."""

_check: ContextVar[Callable[[], None] | None] = ContextVar("fence", default=None)


@contextmanager
def fenced_by(check: Callable[[], None]) -> Iterator[None]:
    """Have the files that this thread writes, replaces and removes within the block changed only while it may.

    Args:
        check: raises a `FencedOffError` once this thread may not write any more.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def check_fence() -> None:
    """Check that this thread may write; between the list of what is to be removed and its removal."""
    if (check := _check.get()) is not None:
        check()


def put(filesystem: fsspec.AbstractFileSystem, name: str, data: bytes) -> None:
    """Write or replace a file of an object store, under this thread's fence if it has one.

    Raises:
        FencedOffError: this thread may not write any more; nothing is written.
        OSError: the store's.
    """
    check = _check.get()
    if check is None or _store(filesystem) is None:
        check_fence()
        filesystem.pipe_file(name, data)
        return
    for last in (*[False] * (_TRIES - 1), True):
        write = _replacement(filesystem, name)
        check()
        try:
            write(data)
        except Exception as error:
            if _is_unknown(error):
                filesystem.pipe_file(name, data)
            elif not _is_changed(error) or last:
                raise
            # If the answer of an earlier try was lost, this writer itself has changed it.
            elif not (filesystem.exists(name) and filesystem.cat_file(name) == data):
                continue
        return


def is_refused(error: OSError) -> bool:
    """Return whether a store has refused a write because of its condition.

    Not every store says so in the same words, and s3fs knows those of AWS. The second completion of an upload in parts
    finds no such upload.
    """
    return isinstance(error, FileExistsError | FileNotFoundError) or error.errno in (errno.EINVAL, errno.EEXIST)


def _is_changed(error: Exception) -> bool:
    """Return whether a store has refused a write because the file has changed. Azure's error is no OSError."""
    return is_refused(error) if isinstance(error, OSError) else getattr(error, "status_code", None) == 412


def _store(filesystem: fsspec.AbstractFileSystem) -> str | None:
    """Return which of the stores with conditions this is; None for any other."""
    protocol = filesystem.protocol
    protocols = (protocol,) if isinstance(protocol, str) else protocol
    return next((_STORES[name] for name in protocols if name in _STORES), None)


def _replacement(filesystem: fsspec.AbstractFileSystem, name: str) -> Callable[[bytes], object]:
    """Return a write on the condition that the file is still the one that is there now, or that there is still none."""
    try:
        found = filesystem.info(name)
    except FileNotFoundError:
        return partial(filesystem.pipe_file, name, mode="create")
    store = _store(filesystem)
    if store == "gcs":
        return partial(_replace_in_gcs, filesystem, name, found["generation"])
    if store == "azure":
        from azure.core import MatchConditions

        condition = {"etag": found["etag"], "match_condition": MatchConditions.IfNotModified}
    else:
        condition = {"IfMatch": found["ETag"]}
    return partial(filesystem.pipe_file, name, **condition)


def _replace_in_gcs(filesystem: fsspec.AbstractFileSystem, name: str, generation: str, data: bytes) -> None:
    # The driver's own write can't tell which generation it replaces.
    bucket, key, _ = filesystem.split_path(name)
    place = filesystem.base.replace("/storage/v1/", f"/upload/storage/v1/b/{quote(bucket, safe='')}/o")
    condition = {"uploadType": "media", "name": key, "ifGenerationMatch": generation}
    headers = {"Content-Type": "application/octet-stream"}
    filesystem.call("POST", place, headers=headers, data=data, **condition)


def _is_unknown(error: Exception) -> bool:
    """Return whether a store knows no such condition."""
    response = getattr(error.__cause__, "response", {})
    return isinstance(response, dict) and response.get("Error", {}).get("Code") == "NotImplemented"
