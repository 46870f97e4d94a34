"""`kill -9` of the driver before and after each of its writes: the same weights, and nothing half-written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.killing import killed_at_writes
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
    places = killed_at_writes(file, tmp_path, 25)
    assert len(places) >= 2, places
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
    assert len(places) == len(set(places)) >= 50, places
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
