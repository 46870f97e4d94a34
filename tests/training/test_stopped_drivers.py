"""A driver that is stopped for longer than its lease, and goes on once another has ended the job, changes nothing."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.journal import lease as lease_module
from rlhfless_operator.training.journal.step_journal import read_status
from tests.training.stopped_driver import STEPS, drive_emulated


@pytest.mark.parametrize(
    "what",
    [
        "write_begun_job",
        "_open_tracking",
        "_forget_data",
        "model",
        "status.json",
        "results/step-000001/batch.json",
        f"batches/step-{STEPS:06d}",
        "remove_garbage",
        "remove_leftovers",
        "summary.json",
    ],
)
def test_what_another_driver_has_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", 1.0)
    job = tmp_path / "job"
    command = [sys.executable, "-m", "tests.training.stopped_driver", str(job), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first, killed(first):
        os.waitpid(first.pid, os.WUNTRACED)
        assert psutil.Process(first.pid).status() == psutil.STATUS_STOPPED
        drive_emulated(str(job))
        status = read_status(JobFolder(str(job)))
        assert status is not None and (status.phase, status.step) == ("Succeeded", STEPS)
        left = contents(job)
        first.send_signal(signal.SIGCONT)
        said, _ = first.communicate(timeout=250)
    # Before its summary, a driver has ended the job itself.
    lost = "LeaseLostError: another driver has taken this job over; this one stops\n"
    assert said == ("" if what == "summary.json" else lost)
    now = contents(job)
    assert left.items() <= now.items()
    # What its own instances were asked for before it stopped may still come, under names that no other driver uses.
    assert all("/chunk-1-" in name for name in now.keys() - left.keys()), now.keys() - left.keys()


@contextlib.contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """Let a process, which may be stopped, not outlive the block."""
    try:
        yield
    finally:
        process.kill()


def contents(folder: Path) -> dict[str, str]:
    """The digests of all files of a job, without the renewals of its drivers' leases and what is half written."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-renewed.json"))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if ".tmp-" not in path.name}
