"""Landlock (landlock(7)): threads and processes that may use only some folders, without any privilege.

Links change nothing about it, even those that somebody makes later: the kernel looks at where a path leads. A thread
that is confined stays so, and so does everything that it starts.
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_OF_VERSIONS = (13, 14, 15, 15, 16)
"""Number of the file rights that versions 1 to 5 know. Each is a bit."""
_EXECUTE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | 1 << 15
"""Rights that a file, and not only a folder, can have."""

_SCOPES_SINCE = 6
"""The first version that keeps signals and abstract Unix sockets within the confined processes."""
_ALL_SCOPES = 1 << 0 | 1 << 1

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the version of Landlock that the kernel has; 0 if it has none."""
    found: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    return max(0, found)


def scopes_signals() -> bool:
    """Return whether the kernel can keep the signals of confined processes from all others."""
    return version() >= _SCOPES_SINCE


class Ruleset:
    """The folders that a thread may use.

    Args:
        read: files and folders to read and execute; those that do not exist are left out.
        write: descriptors of folders in which everything is allowed.
        devices: files to read and write; those that do not exist are left out.
        alone: whether it may send no signals to threads outside, if the kernel can prevent that (`scopes_signals`).

    Raises:
        OSError: the kernel has no Landlock, or a folder can't be opened.
    """

    def __init__(
        self, read: Iterable[Path], write: Iterable[int], devices: Iterable[Path] = (), *, alone: bool = False
    ) -> None:
        known = _OF_VERSIONS[min(version(), len(_OF_VERSIONS)) - 1] if version() else 0
        self._all = (1 << known) - 1
        rights = struct.pack("=Q", self._all)
        if alone and scopes_signals():
            rights = struct.pack("=QQQ", self._all, 0, _ALL_SCOPES)
        self._descriptor = _checked(_libc.syscall(_CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), 0))
        try:
            for descriptor in write:
                self._allow(descriptor, self._all)
            for path in filter(Path.exists, read):
                self._allow_path(path, _READ if path.is_dir() else _READ & _OF_FILES)
            for path in filter(Path.exists, devices):
                self._allow_path(path, _READ_FILE | _WRITE_FILE | _TRUNCATE)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """The descriptor of the rules, by which another process can confine itself."""
        return self._descriptor

    def allow_all(self, folder: Path) -> None:
        """Allow everything in another folder.

        Raises:
            OSError: it can't be opened.
        """
        self._allow_path(folder, self._all)

    def confine(self) -> None:
        """Confine the calling thread, for good.

        Raises:
            OSError: the kernel refuses it.
        """
        _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(_libc.syscall(_RESTRICT_SELF, self._descriptor, 0))

    def close(self) -> None:
        """Forget the rules; confined threads stay confined."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _allow_path(self, path: Path, rights: int) -> None:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            self._allow(descriptor, rights)
        finally:
            os.close(descriptor)

    def _allow(self, descriptor: int, rights: int) -> None:
        rule = struct.pack("=Qi", rights & self._all, descriptor)
        _checked(_libc.syscall(_ADD_RULE, self._descriptor, _PATH_BENEATH, rule, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
