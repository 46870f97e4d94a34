"""One driver a job: numbered leases. The highest owns the job, and a superseded driver finds that out.

A driver takes a lease by creating `leases/NUMBER.json`, which only one can do, and renews it. Another driver takes the
next number only when the lease has expired, was released, or its process is seen to be dead on this very machine.
Before it publishes anything, the holder checks for a higher number: the number is the fence.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError

LEASE_SECONDS = 30.0
RENEW_SECONDS = 5.0


_held: set[str] = set()
"""URIs of the leases that drivers of this very process hold."""


class LeaseHeldError(UserError):
    """Another driver runs this job."""


class LeaseLostError(UserError):
    """Another driver has taken the job over. This one must stop and publish nothing more."""


class Lease:
    """The right to drive a job. Make one with `Lease.acquire`."""

    def __init__(self, folder: str, number: int) -> None:
        self._folder = folder
        self.number = number
        """Number that grows with every driver of the job, and that is in the names of its files."""

    @classmethod
    def acquire(cls, root: str) -> Self:
        """Take the job in the folder `root`.

        Raises:
            LeaseHeldError: another driver holds it; says which.
        """
        folder = artifacts.join(root, "leases")
        newest = _newest(folder)
        if newest:
            holder = artifacts.read_json(_uri(folder, newest))
            if not _is_free(holder, _uri(folder, newest)):
                raise LeaseHeldError(
                    f"this job is driven by process {holder['pid']} on {holder['host']};"
                    f" stop it first, or wait {LEASE_SECONDS:.0f} s after it has gone"
                )
        lease = cls(folder, newest + 1)
        if not artifacts.create_exclusive(_uri(folder, lease.number), lease._content(released=False)):
            raise LeaseHeldError("another driver took this job just now")
        _held.add(_uri(folder, lease.number))
        if newest:
            artifacts.remove(_uri(folder, newest))
        return lease

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: another driver has the job now.
        """
        self.check()
        artifacts.write_bytes(_uri(self._folder, self.number), self._content(released=False))

    def check(self) -> None:
        """Check the fence. Call it before publishing anything.

        Raises:
            LeaseLostError: another driver has the job now.
        """
        if _newest(self._folder) != self.number:
            raise LeaseLostError("another driver has taken this job over; this one stops")

    def release(self) -> None:
        """Let the next driver in at once, one of this process even if the store does not answer."""
        _held.discard(_uri(self._folder, self.number))
        if _newest(self._folder) == self.number:
            artifacts.write_bytes(_uri(self._folder, self.number), self._content(released=True))

    def _content(self, *, released: bool) -> bytes:
        return json.dumps(
            {
                "host": socket.gethostname(),
                "boot": _boot_id(),
                "pid": os.getpid(),
                "process_started": _process_started(os.getpid()),
                "renewed": time.time(),
                "released": released,
            }
        ).encode()


def _uri(folder: str, number: int) -> str:
    return artifacts.join(folder, f"{number:06d}.json")


def _newest(folder: str) -> int:
    numbers = [int(uri.rsplit("/", 1)[-1].removesuffix(".json")) for uri in artifacts.list_files(folder)]
    return max(numbers, default=0)


def _is_free(holder: dict[str, Any], uri: str) -> bool:
    if holder["released"] or time.time() - holder["renewed"] > LEASE_SECONDS:
        return True
    on_this_machine = holder["host"] == socket.gethostname() and holder["boot"] == _boot_id()
    if not on_this_machine:
        return False
    if holder["pid"] == os.getpid() and holder["process_started"] == _process_started(os.getpid()):
        return uri not in _held
    return bool(_process_started(holder["pid"]) != holder["process_started"])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _process_started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, which tells it from a later one with the same
    id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name, the second field, may hold spaces and parentheses.
    return stat.rpartition(")")[2].split()[19]
