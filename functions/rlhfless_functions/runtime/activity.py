"""A sign of whether a task's work goes on.

A worker thread that waits for a lock, a lost connection or a dead process uses no CPU time, and neither does anything
below its process. The thread that serves HTTP goes on, so its heartbeats alone say nothing about the work. A loop that
waits and looks again, or a GPU that never finishes, does use CPU time and is not noticed here.
"""

import contextlib
import time

import psutil

_WORK_SECONDS = 0.005
"""CPU time that counts as work. Threads that only wake now and then use less in minutes."""


class Activity:
    """The CPU time of this process and those below it, except for one thread: the one that makes and asks this."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._used = self._cpu_seconds()
        self._since = time.monotonic()

    def goes_on(self) -> None:
        """Record that the task has shown a sign of work by itself."""
        self._used, self._since = self._cpu_seconds(), time.monotonic()

    def still_seconds(self) -> float:
        """Return for how long nothing has worked; 0 if something has since the last question."""
        used = self._cpu_seconds()
        if abs(used - self._used) >= _WORK_SECONDS:  # The time of a process that has ended is gone.
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
