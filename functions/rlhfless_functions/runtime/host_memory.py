"""The memory that the host, or this container, has left."""

from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""This container's control group."""


def free_host_bytes() -> float:
    """Return the bytes of host memory that this process may still take. Pages of files that the kernel would drop count
    as free."""
    cached = 0
    with suppress(OSError, ValueError):
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        cached = int(statistics.get("inactive_file", 0))
    return min(psutil.virtual_memory().available, container_free_bytes(CGROUP) + cached)


def container_free_bytes(cgroup: Path) -> float:
    """Return the bytes that are free below the container's memory limit (cgroup v2); infinite without a limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return float("inf")
    return float("inf") if limit == "max" else max(0, int(limit) - used)
