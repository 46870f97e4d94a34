"""A sign of whether a task's work goes on.

A worker thread that waits for a lock, a lost connection or a dead process uses no CPU time, and neither does anything
below its process. The thread that serves HTTP goes on, so its heartbeats alone say nothing about the work. A loop that
waits and looks again, or a GPU that never finishes, does use CPU time and is not noticed here. A wait that has a limit
of its own (`limited_wait`) is left to that.
"""

import contextlib
import time
from collections.abc import Iterator

import psutil

_waits: dict[object, float] = {}
"""Ends of the waits that somebody else limits, in monotonic seconds."""
_WORK_SECONDS = 0.005
"""CPU time that counts as work. Threads that only wake now and then use less in minutes."""


@contextlib.contextmanager
def limited_wait(seconds: float) -> Iterator[None]:
    """Mark a wait that its caller ends after so long, such as that for a reward. Until then it is no standstill."""
    wait = object()
    _waits[wait] = time.monotonic() + seconds
    try:
        yield
    finally:
        del _waits[wait]


class Activity:
    """The CPU time of this process and those below it, except for one thread: the one that makes and asks this."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._used: float | None = self._cpu_seconds()
        """CPU time since which nothing has worked; None after a sign of work, until the next question."""
        self._since = time.monotonic()

    def goes_on(self) -> None:
        """Record that the task has shown a sign of work by itself. A batch does so hundreds of times a second, and to
        look at all processes of a machine takes milliseconds."""
        self._used = None

    def still_seconds(self) -> float:
        """Return for how long nothing has worked; 0 if something has since the last question, or during a limited
        wait."""
        used = self._cpu_seconds()
        waits = any(end > time.monotonic() for end in list(_waits.values()))
        # The time of a process that has ended is gone.
        if waits or self._used is None or abs(used - self._used) >= _WORK_SECONDS:
            self._used, self._since = used, time.monotonic()
            return 0.0
        return time.monotonic() - self._since

    def _cpu_seconds(self) -> float:
        used = time.process_time() - time.thread_time()
        with contextlib.suppress(psutil.Error):
            for process in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    used += times.user + times.system
        return used
