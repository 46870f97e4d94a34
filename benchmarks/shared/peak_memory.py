"""Peak memory of a process and its descendants while they run, in the host's memory and on the GPUs."""

import threading
import time
from contextlib import suppress

import psutil

from benchmarks.shared.machine import gpu_query

_PERIOD_SECONDS = 0.5


class PeakMemory:
    """Samples until the process ends."""

    def __init__(self, pid: int) -> None:
        self.driver = 0
        """Resident bytes of the process itself."""
        self.everything = 0
        """Proportional bytes of the whole tree."""
        self._gpu_before = gpu_bytes()
        self._gpu = self._gpu_before
        self._process = psutil.Process(pid)
        threading.Thread(target=self._sample, daemon=True).start()

    @property
    def gpu(self) -> int | None:
        """Bytes in use on all GPUs beyond what was before; None without a GPU."""
        return None if self._gpu is None or self._gpu_before is None else self._gpu - self._gpu_before

    def _sample(self) -> None:
        while True:
            if (used := gpu_bytes()) is not None:
                self._gpu = max(self._gpu or 0, used)
            try:
                self.driver = max(self.driver, self._process.memory_info().rss)
                # Forks share most of their pages with the template: their resident sizes do not add up.
                tree = [self._process, *self._process.children(recursive=True)]
                self.everything = max(self.everything, sum(process.memory_full_info().pss for process in tree))
            except psutil.Error:
                if not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE:
                    return
            time.sleep(_PERIOD_SECONDS)


def gpu_bytes() -> int | None:
    """Bytes in use on all GPUs by all processes; None without a GPU."""
    lines = gpu_query("memory.used")
    with suppress(ValueError):
        return sum(2**20 * int(line) for line in lines) if lines else None
    return None
