"""`kill -9` of instances before, within and after each of their writes: the same weights, and nothing half-written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.asynchronous.test_loop import replayed
from tests.training.dying_instances import dying_instances
from tests.training.whole_jobs import assert_same_final_weights, folder_of, half_written, records_of, run_job

STEPS = 3
SHORT: dict[str, Any] = {
    "steps": STEPS,
    "batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4},
    "sampling": {"maxPromptTokens": 16, "maxResponseTokens": 8},
    "checkpoints": {"everySteps": 1, "keepRollouts": True},
    "evaluation": {"data": {"source": "train.jsonl"}, "everySteps": 1},
    "limits": {"retries": 100},
}

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


def killed_at_writes(file: Path, share: int) -> list[str]:
    """Run a job whose instances die at one of `share` places of their writes; the places."""
    deaths = file.parent / "deaths.txt"
    with dying_instances(folder_of(file), deaths, share):
        run_job(file)
    assert [record["step"] for record in records_of(file)] == list(range(STEPS + 1))
    assert half_written(folder_of(file)) == []
    places = sorted(set(deaths.read_text().splitlines()))
    print(f"{len(places)} places: {places}")
    return places


@pytest.fixture(scope="module")
def undisturbed(shared_tiny_job: Callable[..., Path]) -> Path:
    file = shared_tiny_job("undisturbed", **SHORT)
    run_job(file)
    return file


@pytest.mark.slow
def test_instances_that_die_at_some_of_their_writes_change_nothing(
    tiny_job: Callable[..., Path], undisturbed: Path
) -> None:
    file = tiny_job("killed", **SHORT)
    places = killed_at_writes(file, 11)
    assert len(places) >= 5
    assert_same_final_weights(file, undisturbed)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_instances_that_die_at_each_of_their_writes_change_nothing(
    tiny_job: Callable[..., Path], undisturbed: Path
) -> None:
    file = tiny_job("killed", **SHORT)
    places = killed_at_writes(file, 1)
    assert len(places) >= 100
    assert_same_final_weights(file, undisturbed)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_instances_of_an_asynchronous_job_that_die_at_each_of_their_writes_leave_a_run_that_can_be_replayed(
    tiny_job: Callable[..., Path],
) -> None:
    """Its weights depend on timing; they are those of what its record says that they learnt from."""
    file = tiny_job("killed", **SHORT, **{"async": {"maxStaleness": 1}})
    places = killed_at_writes(file, 1)
    assert len(places) >= 100
    assert "the same weights bit for bit" in replayed(file)
