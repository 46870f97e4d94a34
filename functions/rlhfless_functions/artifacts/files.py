"""URIs and single files: read, write atomically, create exclusively, list, remove."""

import errno
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.core import url_to_fs

from rlhfless_functions.artifacts.errors import ArtifactCorruptError, reading, writing
from rlhfless_functions.artifacts.fencing import check_fence, is_refused, put
from rlhfless_functions.artifacts.names import inside
from rlhfless_functions.artifacts.sealing import parse_sealed, sealed_json

TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{32}")
"""Names of files and folders that are being written."""

MOST_JSON = 64 * 2**20
"""Most bytes of a JSON file."""
_MOST_CONTAINERS = 500_000
_MOST_VALUES = 5_000_000

# --- URIs --------------------------------------------------------------------------------------------------------


def join(base: str, *names: str) -> str:
    """Return `base` with path components appended."""
    start = base.rstrip("/")
    return "/".join([base.removesuffix("/") if start.endswith(":") else start, *names])


def local_path(uri: str) -> Path | None:
    """Return the path of a URI on this machine's file system; None for a URI of any other store."""
    for scheme in ("file://", "local://"):
        if uri.startswith(scheme):
            return Path(uri.removeprefix(scheme))
    return None if "://" in uri or "::" in uri else Path(uri)


def remote(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a URI, and the path in it.

    It is looked up anew each time: fsspec caches the instances, and a forked child must not use its parent's.
    """
    filesystem, path = url_to_fs(uri, use_listings_cache=False)
    return filesystem, path


_of_parent: list[Any] = []


def _leave_connections_to_parent() -> None:
    """Keep the parent's file systems alive and unused. Finalizing one would wait for an event loop that did not
    fork."""
    for cls in _subclasses(fsspec.AbstractFileSystem):
        _of_parent.extend(cls._cache.values())
        cls._cache.clear()


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


os.register_at_fork(after_in_child=_leave_connections_to_parent)

# --- reading -----------------------------------------------------------------------------------------------------


def read_bytes(uri: str, *, most: int | None = None) -> bytes:
    """Return the content of a file.

    Args:
        uri: the file.
        most: bytes that it may have; any number if omitted.

    Raises:
        ArtifactMissingError: if it is not there or cannot be read.
        ArtifactCorruptError: if it is larger, or no regular file.
    """
    path = local_path(uri)
    with reading(uri):
        if path is not None:
            return _read_local(uri, path, most)
        filesystem, name = remote(uri)
        if most is not None and (size := filesystem.size(name)) is not None and size > most:
            raise _too_large(uri, size, most)
        content: bytes = filesystem.cat_file(name)
        return content


def _read_local(uri: str, path: Path, most: int | None) -> bytes:
    # Opening a pipe would wait for its writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if most is None:
            return file.read()
        if not stat.S_ISREG(found.st_mode):
            raise ArtifactCorruptError(f"{uri} is no regular file: remove it")
        # It may grow meanwhile.
        content = b"" if found.st_size > most else file.read(most + 1)
        if found.st_size > most or len(content) > most:
            raise _too_large(uri, max(found.st_size, len(content)), most)
        return content


def _too_large(uri: str, size: int, most: int) -> ArtifactCorruptError:
    return ArtifactCorruptError(f"{uri} has {size} bytes, more than {most}: restore it from a copy, or remove it")


def read_json(uri: str, *, most: int = MOST_JSON) -> Any:
    """Return the content of a JSON file.

    Args:
        uri: the file.
        most: bytes that it may have.

    Raises:
        ArtifactMissingError: if it is not there or cannot be read.
        ArtifactCorruptError: if it is not JSON, is too large, or has changed since `write_json` wrote it.
    """
    content = read_bytes(uri, most=most)
    try:
        # Two characters can become an object of 64 bytes.
        if content.count(b"{") + content.count(b"[") > _MOST_CONTAINERS or content.count(b",") > _MOST_VALUES:
            raise ValueError("it has too many values")
        return parse_sealed(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactCorruptError(f"{uri} is damaged ({error}): restore it from a copy, or remove it") from error


def exists(uri: str) -> bool:
    """Return whether there is a file or folder.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
    """
    path = local_path(uri)
    with reading(uri):
        if path is not None:
            return path.exists()
        filesystem, name = remote(uri)
        return bool(filesystem.exists(name))


def list_files(uri: str) -> list[str]:
    """Return the URIs of all files below a folder, sorted; none if there is no folder. Files still being written are
    left out.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
    """
    return [join(uri, name) for name in sorted(walk(uri)) if not any(map(TEMPORARY.fullmatch, name.split("/")))]


def matching_files(pattern: str) -> list[str]:
    """Return the URIs of all files that match a pattern such as `s3://bucket/train-*.parquet`, sorted.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
    """
    with reading(pattern):
        filesystem, name = remote(pattern)
        return sorted(str(filesystem.unstrip_protocol(each)) for each in filesystem.glob(name))


def walk(uri: str) -> list[str]:
    """Return the paths of all files below a folder, relative to it, including files that are still being written.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
        ArtifactCorruptError: if a key of the store leads out of the folder.
    """
    path = local_path(uri)
    with reading(uri):
        if path is not None:
            return [
                (Path(folder) / name).relative_to(path).as_posix()
                for folder, _, names in os.walk(path)
                for name in names
            ]
        filesystem, folder_name = remote(uri)
        prefix = folder_name.rstrip("/") + "/"
        found = [name.removeprefix(prefix) for name in filesystem.find(folder_name) if name.startswith(prefix)]
        # Some tools mark a folder by an empty object whose key ends with a slash.
        return [_inside(uri, name) for name in found if name and not name.endswith("/")]


def _inside(uri: str, name: str) -> str:
    try:
        return inside(name)
    except ValueError as error:
        raise ArtifactCorruptError(f"{uri} has an object that no folder can hold ({error}): remove it") from error


# --- writing -----------------------------------------------------------------------------------------------------


def write_bytes(uri: str, data: bytes) -> None:
    """Write or replace a file atomically: a reader sees either the old or the new content. A fence holds.

    Raises:
        ArtifactUnwritableError: if it cannot be written; the old content stays.
    """
    path = local_path(uri)
    with writing(uri):
        if path is None:
            put(*remote(uri), data)
            return
        with _written_beside(path, data) as temporary:
            temporary.replace(path)


def write_json(uri: str, value: Any) -> None:
    """Write a JSON file atomically. An object gets a checksum, which `read_json` compares and takes off.

    Raises:
        ArtifactUnwritableError: if it cannot be written.
    """
    write_bytes(uri, sealed_json(value))


def create_exclusive(uri: str, data: bytes) -> bool:
    """Write a file only if there is none. Of all concurrent writers of different contents, exactly one gets True.

    If the answer of a store is lost, the next try is refused, because the file is there. So a refused writer reads the
    file, and the content says whose it is. Writers of equal contents all get True. A caller that must be the only one
    puts something of its own into the content.

    Raises:
        ArtifactUnwritableError: if it cannot be written.
    """
    path = local_path(uri)
    with writing(uri):
        try:
            if path is None:
                filesystem, name = remote(uri)
                filesystem.pipe_file(name, data, mode="create")
            else:
                with _written_beside(path, data) as temporary:
                    os.link(temporary, path)
        except OSError as error:
            if not (is_refused(error) and exists(uri)):
                raise
            return read_bytes(uri) == data
        return True


def create_json(uri: str, value: Any) -> bool:
    """Write a JSON file only if there is none, as `write_json` and `create_exclusive` do.

    Raises:
        ArtifactUnwritableError: if it cannot be written.
    """
    return create_exclusive(uri, sealed_json(value))


def remove(uri: str) -> None:
    """Remove a file, or a folder with all of its content; do nothing if there is none. A fence holds.

    Raises:
        ArtifactUnwritableError: if it cannot be removed.
    """
    path = local_path(uri)
    with writing(uri):
        if path is None:
            filesystem, name = remote(uri)
            # A list may name a file that is gone by now, or the request's answer was lost.
            with suppress(FileNotFoundError):
                if filesystem.exists(name):
                    doomed = filesystem.expand_path(name, recursive=True)
                    # What comes after the check is not on the list.
                    check_fence()
                    filesystem.rm(doomed)
        elif path.is_dir() and not path.is_symlink():
            # A folder vanishes at once, even if the removal of its files is interrupted.
            doomed = path.replace(beside(path))
            with held(doomed):
                shutil.rmtree(doomed)
        else:
            path.unlink(missing_ok=True)


def beside(path: Path) -> Path:
    """Return an unused name in the same folder that marks a temporary of `path`."""
    return path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Mark a temporary as in use, so that it is not taken for the rest of a crash. The kernel removes the mark with the
    process."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def make_held_beside(target: Path) -> tuple[Path, int]:
    """Make a temporary folder beside the target, and return it with the descriptor that holds it. If it was taken for
    abandoned before it was held, make another one."""
    while True:
        folder = beside(target)
        folder.mkdir(parents=True)
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            _lock(descriptor)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # Some network file systems cannot lock a folder.
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Return whether a process is at work on a temporary. If locks do not work, return whether it is younger than an
    hour."""
    with _opened(path) as descriptor:
        return descriptor is not None and _is_locked(descriptor)


def discard(path: Path) -> None:
    """Remove a temporary file or an empty temporary folder, unless a process is at work on it.

    It is locked meanwhile, so a process that is about to use it sees that it is gone.
    """
    with _opened(path) as descriptor:
        if descriptor is not None and not _is_locked(descriptor):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Return whether another process has locked it; lock it otherwise."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime < 3600
    return False


def _locked_beside(path: Path) -> tuple[Path, BinaryIO]:
    """Return a new, locked temporary file. If it was taken for abandoned before it was locked, make another one."""
    while True:
        temporary = beside(path)
        file = temporary.open("wb")
        _lock(file.fileno())
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


@contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, file = _locked_beside(path)
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)
