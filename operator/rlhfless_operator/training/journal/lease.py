"""One driver a job: numbered leases. The highest owns the job, and a superseded driver finds that out.

A driver takes a lease by creating `leases/NUMBER.json`, which only one can do, and renews it in a file beside that.
Another driver takes the next number only if the lease was released, if its process is seen to be dead on this very
machine, or if this driver has watched it for `LEASE_SECONDS` without a renewal. It watches by its own clock: the clocks
of two machines may differ by any time.

The number is the fence: before it writes or removes anything, the holder checks for the next number. On a file system,
no lease is taken between the check and the write; S3, Google Cloud Storage and Azure refuse a write that comes too late
(`Lease.fenced`). Leases are never removed. So nothing depends on a list of them, which a store may give as it was a
moment ago.
"""

import asyncio
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts.errors import writing
from rlhfless_operator.errors import UserError

LEASE_SECONDS = 30.0
RENEW_SECONDS = 5.0
_LOOK_SECONDS = 1.0
"""Seconds between two looks at a lease that is watched."""
_UNREADABLE = "unreadable"
"""Start time of a process that this thread may not look at."""


_Result = TypeVar("_Result")

_held: set[str] = set()
"""URIs of the leases that drivers of this very process hold."""
_watched: dict[str, tuple[bytes, float]] = {}
"""Last renewal of each watched lease, and the time since when it has been the last, in monotonic seconds."""


class LeaseHeldError(UserError):
    """Another driver runs this job.

    Args:
        message: says which, and what to do.
        may_be_gone: whether it has not been seen alive yet.
    """

    def __init__(self, message: str, *, may_be_gone: bool = False) -> None:
        super().__init__(message)
        self.may_be_gone = may_be_gone


class LeaseLostError(UserError, artifacts.FencedOffError):
    """Another driver has taken the job over. This one must stop and publish nothing more."""


@dataclass(frozen=True)
class _Files:
    """The files of one lease."""

    folder: str
    number: int

    @property
    def fence(self) -> str:
        return artifacts.join(self.folder, f"{self.number:06d}.json")

    @property
    def renewal(self) -> str:
        return artifacts.join(self.folder, f"{self.number:06d}-renewed.json")

    @property
    def next(self) -> "_Files":
        return _Files(self.folder, self.number + 1)


class Lease:
    """The right to drive a job. Make one with `Lease.acquire`."""

    def __init__(self, folder: str, number: int) -> None:
        self._files = _Files(folder, number)
        self._renewals = 0
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
        if newest.number:
            holder = artifacts.read_json(newest.fence)
            _check_free(holder, newest)
        lease = cls(folder, newest.number + 1)
        with _alone(folder, fcntl.LOCK_EX):
            taken = artifacts.create_json(lease._files.fence, _identity())
        if not taken:
            raise LeaseHeldError("another driver took this job just now")
        _held.add(lease._files.fence)
        _watched.pop(newest.fence, None)
        return lease

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: another driver has the job now.
        """
        self.check()
        self._renewals += 1
        self._write_renewal(released=False)

    def check(self) -> None:
        """Check the fence.

        Raises:
            LeaseLostError: another driver has the job now.
        """
        if artifacts.exists(self._files.next.fence):
            raise LeaseLostError("another driver has taken this job over; this one stops")

    def fenced(self, write: Callable[..., _Result], *arguments: object) -> _Result:
        """Write something, or remove something, under the lease. Return what `write` returns.

        On a file system, nobody takes the job between the check and the write. In S3, Google Cloud Storage and Azure
        somebody may, but then the write replaces nothing that the other has written. Any other store has neither locks
        nor conditions, and no store has a condition for removals.

        Raises:
            LeaseLostError: another driver has the job now; nothing is written.
        """
        with _alone(self._files.folder, fcntl.LOCK_SH):
            self.check()
            with artifacts.fenced_by(self.check):
                return write(*arguments)

    def release(self) -> None:
        """Let the next driver in at once, one of this process even if the store does not answer."""
        _held.discard(self._files.fence)
        self._write_renewal(released=True)

    def _write_renewal(self, *, released: bool) -> None:
        artifacts.write_json(self._files.renewal, {"renewals": self._renewals, "released": released})


async def take_lease(root: str, note: Callable[[str], None] = lambda text: None) -> Lease:
    """Take the job in the folder `root`. If its last driver may be gone, watch its lease until that is known.

    Args:
        note: told that and why it takes a while.

    Raises:
        LeaseHeldError: another driver holds it; says which.
    """
    noted = False
    while True:
        try:
            return await asyncio.to_thread(Lease.acquire, root)
        except LeaseHeldError as error:
            if not error.may_be_gone:
                raise
            if not noted:
                note(f"{error}: waiting for up to {LEASE_SECONDS:.0f} s to see whether it is still there")
            noted = True
        await asyncio.sleep(_LOOK_SECONDS)


def _newest(folder: str) -> _Files:
    """Return the files of the newest lease; number 0 before the first."""
    names = [uri.rsplit("/", 1)[-1].removesuffix(".json") for uri in artifacts.list_files(folder)]
    newest = _Files(folder, max((int(name) for name in names if name.isdecimal()), default=0))
    while artifacts.exists(newest.next.fence):  # The list may lack it.
        newest = newest.next
    return newest


def _check_free(holder: dict[str, Any], lease: _Files) -> None:
    """Check that a lease's holder has gone.

    Raises:
        LeaseHeldError: it has not, or that is not known yet.
    """
    try:
        renewal = artifacts.read_bytes(lease.renewal)
    except artifacts.ArtifactMissingError:
        if artifacts.exists(lease.renewal):
            raise
        renewal = b"{}"
    if _is_release(renewal):
        return
    seen, since = _watched.get(lease.fence, (None, 0.0))
    now = time.monotonic()
    if seen != renewal:
        _watched[lease.fence] = renewal, now
    elif now - since > LEASE_SECONDS:
        return
    who = f"process {holder['pid']} on {holder['host']}"
    here = holder["host"] == socket.gethostname() and holder["boot"] == _this.boot
    started = _process_started(holder["pid"]) if here else _UNREADABLE
    if here and (holder["pid"], holder["process_started"]) == (_this.pid, _this.started):
        if lease.fence not in _held:
            return
    elif started == _UNREADABLE:
        if seen in (None, renewal):
            raise LeaseHeldError(f"this job was last driven by {who}", may_be_gone=True)
    elif started != holder["process_started"]:
        return
    raise LeaseHeldError(f"this job is driven by {who}; stop it first, or wait {LEASE_SECONDS:.0f} s after it has gone")


def _is_release(renewal: bytes) -> bool:
    """Return whether a renewal says that the lease is released. A damaged one says nothing."""
    try:
        return bool(artifacts.parse_sealed(renewal).get("released"))
    except ValueError:
        return False


@contextmanager
def _alone(folder: str, how: int) -> Iterator[None]:
    """Keep drivers from taking the job, or from writing while it is taken. Without effect in stores without locks.

    Args:
        folder: URI of the leases.
        how: `fcntl.LOCK_SH` to write, `fcntl.LOCK_EX` to take the job.

    Raises:
        LeaseHeldError: a driver was stopped in the middle of a write.
    """
    path = artifacts.local_path(folder)
    if path is None:
        yield
        return
    with writing(folder):
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LEASE_SECONDS
        with suppress(OSError):  # Some network file systems cannot lock a folder.
            while not _locks(descriptor, how):
                if time.monotonic() > deadline:
                    raise LeaseHeldError(
                        "this job's driver was stopped in the middle of a write: let it go on (kill -CONT), or end it"
                    )
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _locks(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _identity() -> dict[str, Any]:
    """Return the content of a new lease. It is like no other, so a driver knows its own."""
    return {
        "host": socket.gethostname(),
        "boot": _this.boot,
        "pid": _this.pid,
        "process_started": _this.started,
        "id": uuid.uuid4().hex,
    }


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _process_started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, which tells it from a later one with the same
    id. None if there is no such process, and `_UNREADABLE` if this thread may not look."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except PermissionError:
        return _UNREADABLE
    except OSError:
        return None
    # The command's name, the second field, may hold spaces and parentheses.
    return stat.rpartition(")")[2].split()[19]


class _ThisProcess:
    """This process, read when it begins: a thread that is confined to a job's folder can't read /proc."""

    def __init__(self) -> None:
        self.look()

    def look(self) -> None:
        self.boot = _boot_id()
        self.pid = os.getpid()
        self.started = _process_started(self.pid)


_this = _ThisProcess()
os.register_at_fork(after_in_child=_this.look)
