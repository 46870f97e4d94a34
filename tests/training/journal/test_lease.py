"""The lease: one driver a job, taken over only from the dead, and a superseded driver finds out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.training.journal import lease as lease_module
from rlhfless_operator.training.journal.lease import LEASE_SECONDS, Lease, LeaseHeldError, LeaseLostError, take_lease


def test_a_second_driver_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    Lease.acquire(str(tmp_path))
    with pytest.raises(LeaseHeldError, match=f"driven by process {os.getpid()} on "):
        Lease.acquire(str(tmp_path))


def test_a_released_lease_is_free_at_once(tmp_path: Path) -> None:
    first = Lease.acquire(str(tmp_path))
    first.release()
    assert Lease.acquire(str(tmp_path)).number == first.number + 1


def test_a_holder_that_this_thread_may_not_look_at_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A job's thread in the operator is confined to folders, and /proc is not among them.
    script = (
        "from rlhfless_operator.training.journal.lease import Lease;"
        f" Lease.acquire({str(tmp_path)!r}); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(LeaseHeldError) as held:
            Lease.acquire(str(tmp_path))
        assert not held.value.may_be_gone, "it is seen to be there"
        monkeypatch.setattr(lease_module, "_process_started", lambda pid: lease_module._UNREADABLE)
        lease_module._watched.clear()
        with pytest.raises(LeaseHeldError) as held:
            Lease.acquire(str(tmp_path))
        assert held.value.may_be_gone
        process.kill()


def test_a_dead_process_of_this_machine_holds_nothing(tmp_path: Path) -> None:
    script = (
        "import os; from rlhfless_operator.training.journal.lease import Lease;"
        f" Lease.acquire({str(tmp_path)!r}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert Lease.acquire(str(tmp_path)).number == 2


class Watch:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(lease_module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(lease_module, "_watched", {})
    return Watch(monkeypatch)


def moved_elsewhere(lease: Lease, root: Path) -> None:
    """Let a lease's holder be on another machine."""
    file = str(root / "leases" / f"{lease.number:06d}.json")
    artifacts.write_json(file, {**artifacts.read_json(file), "host": "elsewhere", "pid": 1})


def test_a_lease_that_is_not_renewed_while_it_is_watched_is_taken_over_and_its_holder_is_fenced_off(
    tmp_path: Path, watch: Watch
) -> None:
    first = Lease.acquire(str(tmp_path))
    moved_elsewhere(first, tmp_path)
    with pytest.raises(LeaseHeldError, match="last driven by process 1 on elsewhere") as held:
        Lease.acquire(str(tmp_path))
    assert held.value.may_be_gone
    watch.now += LEASE_SECONDS + 1
    second = Lease.acquire(str(tmp_path))
    second.check()
    written: list[str] = []
    for publish in (first.check, first.renew, lambda: first.fenced(written.append, "Running, step 1")):
        with pytest.raises(LeaseLostError):
            publish()
    assert not written
    first.release()
    second.check()
    with pytest.raises(LeaseHeldError):
        Lease.acquire(str(tmp_path))


def test_a_renewed_lease_is_respected_however_old_its_clock_says_it_is(tmp_path: Path, watch: Watch) -> None:
    lease = Lease.acquire(str(tmp_path))
    moved_elsewhere(lease, tmp_path)
    for _ in range(5):
        lease.renew()
        with pytest.raises(LeaseHeldError) as held:
            Lease.acquire(str(tmp_path))
        watch.now += LEASE_SECONDS - 1
    assert not held.value.may_be_gone, "its holder was seen to renew it"


def test_a_holder_on_this_machine_that_renews_nothing_is_named_at_once(tmp_path: Path, watch: Watch) -> None:
    Lease.acquire(str(tmp_path))
    with pytest.raises(LeaseHeldError, match="stop it first") as held:
        Lease.acquire(str(tmp_path))
    assert not held.value.may_be_gone
    watch.now += LEASE_SECONDS + 1
    assert Lease.acquire(str(tmp_path)).number == 2, "it was stopped"


async def test_a_driver_waits_until_it_knows_that_the_last_one_is_gone(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_elsewhere(Lease.acquire(str(tmp_path)), tmp_path)

    async def pass_by(seconds: float) -> None:
        watch.now += seconds

    monkeypatch.setattr(lease_module.asyncio, "sleep", pass_by)
    notes: list[str] = []
    lease = await take_lease(str(tmp_path), notes.append)
    assert lease.number == 2
    assert len(notes) == 1
    assert "waiting for up to 30 s" in notes[0]


def test_a_list_that_lacks_the_newest_leases_makes_no_second_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        Lease.acquire(str(tmp_path)).release()
    held = Lease.acquire(str(tmp_path))
    for known in range(4):
        listed = [f"{tmp_path}/leases/{number:06d}.json" for number in range(1, known + 1)]
        monkeypatch.setattr(artifacts, "list_files", lambda folder, listed=listed: listed)
        with pytest.raises(LeaseHeldError):
            Lease.acquire(str(tmp_path))
        held.check()


def test_a_driver_that_is_stopped_between_the_check_and_the_write_is_not_superseded_there(
    tmp_path: Path, watch: Watch
) -> None:
    lease = Lease.acquire(str(tmp_path))
    moved_elsewhere(lease, tmp_path)

    def stopped() -> None:
        for _ in range(2):
            with pytest.raises(LeaseHeldError):
                Lease.acquire(str(tmp_path))
            watch.now += LEASE_SECONDS + 1
        with pytest.raises(LeaseHeldError, match="stopped in the middle of a write: let it go on"):
            Lease.acquire(str(tmp_path))

    lease.fenced(stopped)
    lease.check()
    Lease.acquire(str(tmp_path))


def test_a_lease_that_this_process_could_not_give_back_is_free_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease.acquire(str(tmp_path))
    with monkeypatch.context() as outage:
        outage.setattr(artifacts, "write_json", unreachable)
        with pytest.raises(artifacts.ArtifactMissingError):
            lease.release()
    assert Lease.acquire(str(tmp_path)).number == 2


def unreachable(uri: str, content: object) -> None:
    raise artifacts.ArtifactMissingError(f"{uri} cannot be read")
