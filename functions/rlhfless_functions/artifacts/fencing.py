"""Writes that are made only while their writer has a right to them, such as a lease.

On a file system a lock keeps others from taking the right between the check and the write. An object store has no
locks. There a file is replaced only if it is still the one that was there before the check, with S3's conditional puts:
a writer that was stopped in between can't replace what its successor has written.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import fsspec

_TRIES = 5
"""Most tries to replace a file that changes meanwhile."""
_CONDITIONAL = ("s3", "s3a")
"""Protocols whose driver passes a condition on to the store."""

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
    if check is None or not _is_conditional(filesystem):
        check_fence()
        filesystem.pipe_file(name, data)
        return
    for last in (*[False] * (_TRIES - 1), True):
        condition = _present(filesystem, name)
        check()
        try:
            filesystem.pipe_file(name, data, **condition)
        except OSError as error:
            if _is_unknown(error):
                filesystem.pipe_file(name, data)
            elif not is_refused(error) or last:
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


def _is_conditional(filesystem: fsspec.AbstractFileSystem) -> bool:
    protocol = filesystem.protocol
    return any(name in _CONDITIONAL for name in ((protocol,) if isinstance(protocol, str) else protocol))


def _present(filesystem: fsspec.AbstractFileSystem, name: str) -> dict[str, Any]:
    """Return the condition that a file is still the one that is there now, or that there is still none."""
    try:
        return {"IfMatch": filesystem.info(name)["ETag"]}
    except FileNotFoundError:
        return {"IfNoneMatch": "*"}


def _is_unknown(error: OSError) -> bool:
    """Return whether a store knows no such condition."""
    response = getattr(error.__cause__, "response", {})
    return response.get("Error", {}).get("Code") == "NotImplemented"
