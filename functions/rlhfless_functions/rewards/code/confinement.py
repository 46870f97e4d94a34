"""Landlock's rules and the seccomp filter for code under test, as far as this machine knows them.

The code reads Python, its packages and the system's libraries, and writes in a folder of its own. It reaches nothing
else: no artifacts, no other program's folder, no home, no installed package to write to, no /dev/shm. Where Landlock is
missing, it writes nowhere.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhfless_functions.rewards import seccomp
from rlhfless_functions.runtime import landlock

_SYSTEM = (
    "/usr", "/lib", "/lib64", "/lib32", "/bin", "/proc", "/sys/devices/system/cpu", "/sys/devices/system/node",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime", "/etc/timezone",
    "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/mime.types", "/etc/ssl/certs", "/etc/ssl/openssl.cnf",
    "/etc/fonts", "/dev/urandom", "/dev/random",
)  # fmt: skip
"""Files that Python's standard library and the usual packages read, besides their own."""
_DEVICES = tuple(map(Path, ("/dev/null", "/dev/zero", "/dev/full")))
_TRUNCATES_SINCE = 3
"""The first version of Landlock that has rules about shortening files."""


@dataclass(frozen=True)
class Confinement:
    """The limits of programs on this machine.

    Args:
        files: whether by Landlock.
        truncation: whether Landlock's rules are about shortening files, too.
        signals: whether Landlock keeps a program's signals.
        asks: whether a program's keeper is asked before each fork.
    """

    files: bool
    truncation: bool
    signals: bool
    asks: bool

    @functools.cached_property
    def _filter(self) -> str:
        watch = seccomp.watch(files=self.files, truncation=self.truncation, signals=self.signals, asks=self.asks)
        return watch.hex()

    @contextlib.contextmanager
    def arguments(self, folder: Path) -> Iterator[tuple[int, tuple[object, ...]]]:
        """Yield the descriptor of Landlock's rules (-1 without) for a program in this folder, and the runner's
        arguments RULES, FILTER and ASKS."""
        if not self.files:
            yield -1, (-1, self._filter, int(self.asks))
            return
        with landlock.Ruleset(_READABLE, (), _DEVICES, alone=True) as rules:
            rules.allow_all(folder)
            yield rules.descriptor, (rules.descriptor, self._filter, int(self.asks))


def best() -> Confinement:
    """Return the closest confinement that this machine knows."""
    version = landlock.version()
    return Confinement(
        files=version > 0,
        truncation=version >= _TRUNCATES_SINCE,
        signals=landlock.scopes_signals(),
        asks=seccomp.asks(),
    )


def lacking(confinement: Confinement, *, filtered: bool) -> list[str]:
    """Return a sentence about each protection that this machine lacks, for the log.

    Args:
        confinement: how programs are confined.
        filtered: whether the worker has its seccomp filter.
    """
    found = []
    if not filtered:
        found.append("it may reach the network and other processes: this machine has no seccomp filters")
    if not confinement.files:
        found.append("it reads all that its user may, and writes no files: this kernel has no Landlock (Linux 5.13)")
    if not confinement.asks:
        found.append("nothing but the pod bounds its processes: seccomp can't ask before a fork (Linux 5.5)")
    return found


def _readable() -> tuple[Path, ...]:
    prefixes = {Path(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)}
    resolved = {path.resolve() for path in prefixes}
    return (*map(Path, _SYSTEM), *sorted((prefixes | resolved) - {Path("/")}))


_READABLE = _readable()
