"""Errors of the store. Their messages name the URI and the remedy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from fsspec.core import url_to_fs

from rlhfless_functions.api import FailureReason


class ArtifactError(OSError):
    """The store can't do what it was asked for."""

    reason: FailureReason = "artifact_missing"
    """The contract's reason for this failure."""
    retryable: bool = False
    """Whether another try may succeed without a repair, because the store did not answer."""


class FencedOffError(Exception):
    """The writer has lost its right to write; see `fencing`."""


class ArtifactMissingError(ArtifactError):
    """There is nothing at the URI, or it can't be read."""


class ArtifactCorruptError(ArtifactError):
    """The content at the URI is not the published content."""


class ArtifactUnwritableError(ArtifactError):
    """The URI can't be written: no permission, no space, or no such bucket."""

    reason: FailureReason = "artifact_unwritable"


_PASSING = {errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN,
            errno.EHOSTUNREACH, errno.EIO, errno.ENETDOWN, errno.ENETUNREACH, errno.EPIPE, errno.ESTALE,
            errno.ETIMEDOUT}  # fmt: skip
"""Errors of a network file system, or of a request that s3fs gives up."""
_WITH_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs")
_NOT_FOUND = (FileNotFoundError, NotADirectoryError)


@contextmanager
def reading(uri: str) -> Iterator[None]:
    """Turn any error of a file system during a read of `uri` into an ArtifactMissingError."""
    try:
        yield
    except ArtifactError:
        raise
    except (*_NOT_FOUND, IsADirectoryError) as error:
        remedy = missing_bucket(uri) or "check the URI, or make the artifact again if it was removed"
        raise ArtifactMissingError(f"{uri} does not exist: {remedy}") from error
    except PermissionError as error:
        raise ArtifactMissingError(
            f"{uri} may not be read: give this user or its credentials permission to read it ({error})"
        ) from error
    except Exception as error:
        unreadable = ArtifactMissingError(f"{uri} cannot be read: {_no_answer(error)}")
        unreadable.retryable = _may_pass(error)
        raise unreadable from error


def missing_bucket(uri: str) -> str | None:
    """Return the remedy if the bucket of a URI can't be found; None if it can, or if the store has no buckets."""
    scheme, _, rest = uri.partition("://")
    bucket = rest.partition("/")[0]
    if scheme not in _WITH_BUCKETS or not bucket:
        return None
    try:
        filesystem, name = url_to_fs(f"{scheme}://{bucket}", use_listings_cache=False)
        found = bool(filesystem.exists(name))
    except Exception:  # It is asked for a better word on an error that stands anyway.
        return None
    if found:
        return None
    return f"the bucket {bucket} cannot be found; make it, or check its name, credentials and, for S3, AWS_ENDPOINT_URL"


@contextmanager
def writing(uri: str) -> Iterator[None]:
    """Turn any error of a file system during a write of `uri` into an ArtifactUnwritableError."""
    try:
        yield
    except (ArtifactError, FencedOffError):
        raise
    except Exception as error:
        raise unwritable(uri, error) from error


def unwritable(uri: str, error: Exception) -> ArtifactUnwritableError:
    """Return the error that says why `uri` could not be written."""
    refusal = ArtifactUnwritableError(f"{uri} cannot be written: {_obstacle(error)}")
    refusal.retryable = _may_pass(error)
    return refusal


def no_space(error: BaseException) -> bool:
    """Return whether a disk or quota is full, or a file may not grow further."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _may_pass(error: Exception) -> bool:
    """Return whether the store did not answer. Otherwise the request itself failed."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError):
        return error.errno in _PASSING
    return not isinstance(error, ImportError | ValueError)


def _obstacle(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "no file may be that large; raise the limit (ulimit -f), or choose another artifacts URI"
    if no_space(error):
        return "no space is left on the device; free some, or choose another artifacts URI"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return f"no permission; give this user or its credentials write access, or choose another URI ({error})"
    if isinstance(error, (*_NOT_FOUND, FileExistsError, IsADirectoryError)):
        return f"a part of it is missing or not a folder; make the bucket or folder, or choose another URI ({error})"
    return _no_answer(error)


def _no_answer(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"its protocol needs a package that is not installed ({error})"
    if isinstance(error, ValueError):
        return f"it is no URI of a store that there is a driver for; check it and, for S3, AWS_ENDPOINT_URL ({error})"
    return (
        "the store did not answer as it should; check the URI and, for S3, AWS_ENDPOINT_URL and the credentials"
        f" ({type(error).__name__}: {error})"
    )
