"""URIs and single files: read, write atomically, create exclusively, list, remove."""

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.core import url_to_fs

from rlhfless_functions.artifacts.errors import ArtifactCorruptError, reading, writing

TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{32}")
"""Names of files and folders that are being written."""

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


def read_bytes(uri: str) -> bytes:
    """Return the content of a file.

    Raises:
        ArtifactMissingError: if it is not there or cannot be read.
    """
    path = local_path(uri)
    with reading(uri):
        if path is not None:
            return path.read_bytes()
        filesystem, name = remote(uri)
        content: bytes = filesystem.cat_file(name)
        return content


def read_json(uri: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        ArtifactMissingError: if it is not there or cannot be read.
        ArtifactCorruptError: if it is not JSON.
    """
    try:
        return json.loads(read_bytes(uri))
    except ValueError as error:
        raise ArtifactCorruptError(f"{uri} is no JSON ({error}): restore it from a copy, or remove it") from error


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


def walk(uri: str) -> list[str]:
    """Return the paths of all files below a folder, relative to it, including files that are still being written.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
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
        return [name.removeprefix(prefix) for name in filesystem.find(folder_name) if name.startswith(prefix)]


# --- writing -----------------------------------------------------------------------------------------------------


def write_bytes(uri: str, data: bytes) -> None:
    """Write or replace a file atomically: a reader sees either the old or the new content.

    Raises:
        ArtifactUnwritableError: if it cannot be written; the old content stays.
    """
    path = local_path(uri)
    with writing(uri):
        if path is None:
            filesystem, name = remote(uri)
            filesystem.pipe_file(name, data)
            return
        with _written_beside(path, data) as temporary:
            temporary.replace(path)


def write_json(uri: str, value: Any) -> None:
    """Write a JSON file atomically.

    Raises:
        ArtifactUnwritableError: if it cannot be written.
    """
    write_bytes(uri, json.dumps(value).encode())


def create_exclusive(uri: str, data: bytes) -> bool:
    """Write a file only if there is none. Of all concurrent writers, exactly one gets True.

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
        except FileExistsError:
            if not exists(uri):
                raise
            return False
        return True


def remove(uri: str) -> None:
    """Remove a file, or a folder with all of its content; do nothing if there is none.

    Raises:
        ArtifactUnwritableError: if it cannot be removed.
    """
    path = local_path(uri)
    with writing(uri):
        if path is None:
            filesystem, name = remote(uri)
            if filesystem.exists(name):
                filesystem.rm(name, recursive=True)
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
