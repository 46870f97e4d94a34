"""`kill -9` of the driver before and after each of its writes: the same weights, and nothing half-written."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.whole_jobs import assert_same_final_weights, folder_of, half_written, records_of, run_job

STEPS = 2
SHORT = {
    "steps": STEPS,
    "batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4},
    "sampling": {"maxPromptTokens": 16, "maxResponseTokens": 8},
    "checkpoints": {"everySteps": 1},
    "evaluation": {"data": {"source": "train.jsonl"}, "everySteps": 1},
}
ASYNCHRONOUS = {**SHORT, "async": {"maxStaleness": 1}}

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


def killed_at_writes(file: Path, folder: Path, share: int) -> list[str]:
    """Run a job whose driver dies at one of `share` places of its writes; the places."""
    deaths, log = folder / "deaths.txt", folder / "log.txt"
    command = [sys.executable, "-m", "tests.training.dying_at_writes", str(file), str(deaths), str(share)]
    while True:
        with log.open("ab") as output:
            ended = subprocess.run(command, stdout=output, stderr=output, timeout=900, check=False)
        if ended.returncode == 0:
            return deaths.read_text().splitlines()
        assert ended.returncode == -signal.SIGKILL, log.read_text()[-4000:]


def check(file: Path, undisturbed: Path) -> None:
    """That a killed job came to what an undisturbed one did."""
    assert_same_final_weights(file, undisturbed)
    assert [record["step"] for record in records_of(file)] == list(range(STEPS + 1))
    assert half_written(folder_of(file)) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_driver_that_dies_at_some_of_its_writes_changes_nothing(
    tiny_job: Callable[..., Path], tmp_path: Path
) -> None:
    undisturbed = tiny_job("undisturbed", **SHORT)
    run_job(undisturbed)
    file = tiny_job("killed", **SHORT)
    places = killed_at_writes(file, tmp_path, 16)
    assert len(places) >= 3, places
    check(file, undisturbed)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_a_driver_that_dies_at_each_of_its_writes_changes_nothing(
    tiny_job: Callable[..., Path], tmp_path: Path
) -> None:
    undisturbed = tiny_job("undisturbed", **SHORT)
    run_job(undisturbed)
    file = tiny_job("killed", **SHORT)
    places = killed_at_writes(file, tmp_path, 1)
    print(f"{len(places)} places")
    assert len(places) == len(set(places)) >= 60, places
    check(file, undisturbed)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_an_asynchronous_driver_that_dies_at_each_of_its_writes_ends(
    tiny_job: Callable[..., Path], tmp_path: Path
) -> None:
    """Its weights depend on timing; the record of each step is what it learnt from."""
    file = tiny_job("killed", **ASYNCHRONOUS)
    places = killed_at_writes(file, tmp_path, 1)
    print(f"{len(places)} places")
    assert any("journal/" in place for place in places)
    assert [record["step"] for record in records_of(file)] == list(range(STEPS + 1))
    assert half_written(folder_of(file)) == []
