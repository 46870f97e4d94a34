"""The lease: one driver a job, taken over only from the dead, and a superseded driver finds out."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.training.journal import lease as lease_module
from rlhfless_operator.training.journal.lease import LEASE_SECONDS, Lease, LeaseHeldError, LeaseLostError


def test_a_second_driver_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    Lease.acquire(str(tmp_path))
    with pytest.raises(LeaseHeldError, match=f"driven by process {os.getpid()} on "):
        Lease.acquire(str(tmp_path))


def test_a_released_lease_is_free_at_once(tmp_path: Path) -> None:
    first = Lease.acquire(str(tmp_path))
    first.release()
    assert Lease.acquire(str(tmp_path)).number == first.number + 1


def test_a_dead_process_of_this_machine_holds_nothing(tmp_path: Path) -> None:
    script = (
        "import os; from rlhfless_operator.training.journal.lease import Lease;"
        f" Lease.acquire({str(tmp_path)!r}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert Lease.acquire(str(tmp_path)).number == 2


def test_an_expired_lease_is_taken_over_and_its_holder_is_fenced_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Lease.acquire(str(tmp_path))
    later = time.time() + LEASE_SECONDS + 1
    monkeypatch.setattr(lease_module.time, "time", lambda: later)
    second = Lease.acquire(str(tmp_path))
    second.check()
    for publish in (first.check, first.renew):
        with pytest.raises(LeaseLostError):
            publish()
    first.release()
    second.check()


def test_a_renewed_lease_does_not_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease.acquire(str(tmp_path))
    later = time.time() + LEASE_SECONDS - 1
    monkeypatch.setattr(lease_module.time, "time", lambda: later)
    lease.renew()
    monkeypatch.setattr(lease_module.time, "time", lambda: later + LEASE_SECONDS - 1)
    with pytest.raises(LeaseHeldError):
        Lease.acquire(str(tmp_path))


def test_a_lease_of_another_machine_is_respected_until_it_expires(tmp_path: Path) -> None:
    lease = Lease.acquire(str(tmp_path))
    file = tmp_path / "leases" / f"{lease.number:06d}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "host": "elsewhere", "pid": 1}))
    with pytest.raises(LeaseHeldError, match="process 1 on elsewhere"):
        Lease.acquire(str(tmp_path))


def test_a_lease_that_this_process_could_not_give_back_is_free_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease.acquire(str(tmp_path))
    with monkeypatch.context() as outage:
        outage.setattr(artifacts, "list_files", unreachable)
        with pytest.raises(artifacts.ArtifactMissingError):
            lease.release()
    assert Lease.acquire(str(tmp_path)).number == 2


def unreachable(uri: str) -> list[str]:
    raise artifacts.ArtifactMissingError(f"{uri} cannot be read")
