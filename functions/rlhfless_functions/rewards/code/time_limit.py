"""The time limit of one test, which a busy machine does not shorten.

Processes that wait (for a lock, in `sleep`) have so many seconds on the clock. Processes that compute have so many of
CPU time, however long they wait for a core, up to `WAIT_FACTOR` times the limit on the clock.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rlhfless_functions.rewards.checks import WAIT_FACTOR

TICK = 0.1
"""Seconds between looks at processes that are over the limit on the clock."""
_LOOKS = 3
"""Looks in a row at which all processes wait before their time is over."""
_CLOCK = os.sysconf("SC_CLK_TCK")


class TimeLimit:
    """The time of one test after the other in the same processes.

    Args:
        processes: the processes, each of which leads a session.
        seconds: limit of one test.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
        self._sessions = {process.pid for process in processes}
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Begin the next test."""
        self._begun = time.monotonic()
        self._waiting = 0
        self._spent = sum(cpu for pid in self._sessions for _, _, cpu in _read(pid))

    def left(self) -> float:
        """Return the seconds after which `is_over` should be called."""
        return max(TICK, self._begun + self._seconds - time.monotonic())

    def is_over(self) -> bool:
        """Return whether the test has used up its time."""
        passed = time.monotonic() - self._begun
        if passed < self._seconds:
            return False
        found = [each for pid in _processes() for each in _read(pid) if each[0] in self._sessions]
        spent = sum(cpu for _, _, cpu in found) - self._spent
        self._waiting = 0 if any(state in "RD" for _, state, _ in found) else self._waiting + 1
        return passed >= WAIT_FACTOR * self._seconds or spent >= self._seconds or self._waiting >= _LOOKS


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int) -> list[tuple[int, str, float]]:
    """Return a process's session, state and seconds of CPU time with those of its ended children; empty if it has
    ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return [(int(fields[3]), fields[0], sum(map(int, fields[11:15])) / _CLOCK)]
    return []
