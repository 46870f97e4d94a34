"""Jobs of whole epochs whose steps replace groups: they end with the data, after fewer steps than planned."""

import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.data.traces import read_trace_rows
from rlhfless_functions.learning.optimizers import schedule_factor
from rlhfless_functions.settings.optimizer import OptimizerSettings
from rlhfless_operator.local.local_run import JobFinishedError
from tests.training.killing import start
from tests.training.rounds import rounds_job
from tests.training.whole_jobs import MakeJob, assert_same_final_weights, folder_of, records_of, run_job, status_of

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

PROMPTS, PER_STEP, PLANNED = 12, 2, 6
AHEAD = {"async": {"maxStaleness": 1}, "checkpoints": {"keepRollouts": True}}
EVALUATED = {"evaluation": {"data": {"source": "train.jsonl"}, "samplesPerPrompt": 1}}


def epochs_job(make_job: MakeJob, name: str, **overrides: Any) -> Path:
    """A job of one epoch, in which half of the prompts teach nothing."""
    length = {"steps": None, "epochs": 1, "batch": {"promptsPerStep": PER_STEP}}
    optimizer = {"learningRate": 1e-3, "schedule": "linear", "finalRatio": 0.0}
    return rounds_job(make_job, name, **{**length, "optimizer": optimizer, **overrides})


@pytest.fixture(scope="module")
def undisturbed(shared_tiny_job: MakeJob) -> Path:
    file = epochs_job(shared_tiny_job, "undisturbed", checkpoints={"keepRollouts": True}, **EVALUATED)
    run_job(file)
    return file


@pytest.fixture(scope="module")
def ahead(shared_tiny_job: MakeJob) -> Path:
    file = epochs_job(shared_tiny_job, "ahead", **AHEAD, **EVALUATED)
    run_job(file)
    return file


def draws(file: Path) -> list[int]:
    """How often each prompt was drawn in the whole job."""
    rows = read_trace_rows(str(folder_of(file)))
    assert rows.step is not None
    return [count for _, count in Counter(prompt for prompt, _ in {*zip(rows.prompt, rows.step, strict=True)}).items()]


@pytest.mark.parametrize("kind", ["undisturbed", "ahead"])
def test_a_job_ends_once_the_prompts_of_its_epochs_are_drawn(kind: str, request: pytest.FixtureRequest) -> None:
    file = request.getfixturevalue(kind)
    status, records = status_of(file), records_of(file)
    steps = len(records) - 1
    assert 2 <= steps < PLANNED
    assert (status["phase"], status["step"], status["steps"]) == ("Succeeded", steps, steps)
    assert PROMPTS <= sum(draws(file)) < PROMPTS + PER_STEP
    metrics = [record["metrics"] for record in records if record["step"]]
    epochs = [each["dynamic_sampling/epoch"] for each in metrics]
    assert epochs[-2] < 1 <= epochs[-1]
    assert epochs[-1] * PROMPTS == sum(each["groups"] for each in metrics)
    assert [record["step"] for record in records if record["evaluation"]] == [0, steps], "before and after"
    assert status["checkpoint"]["step"] == steps
    assert (folder_of(file) / "model").exists()


def test_the_schedule_is_that_of_the_planned_steps(undisturbed: Path) -> None:
    optimizer = OptimizerSettings(learning_rate=1e-3, schedule="linear", final_ratio=0.0)
    rates = [record["metrics"]["policy/learning_rate"] for record in records_of(undisturbed) if record["step"]]
    planned = [1e-3 * schedule_factor(optimizer, step, PLANNED) for step in range(1, len(rates) + 1)]
    assert rates == pytest.approx(planned)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["undisturbed", "ahead"])
def test_its_replay_has_the_same_weights(kind: str, request: pytest.FixtureRequest) -> None:
    from tests.training.asynchronous.test_loop import replayed

    assert "the same weights bit for bit" in replayed(request.getfixturevalue(kind))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_killing_everything_once_in_every_round_changes_nothing(
    tiny_job: MakeJob, undisturbed: Path, tmp_path: Path
) -> None:
    file = epochs_job(tiny_job, "killed", limits={"retries": 20}, **EVALUATED)
    command = [sys.executable, "-m", "tests.training.dying_driver", str(file), str(tmp_path / "deaths.txt")]
    log, drivers = tmp_path / "log.txt", 1
    while (code := start(command, log).wait()) != 0:
        assert code == -signal.SIGKILL, log.read_text()[-4000:]
        drivers += 1
    assert drivers > 3
    assert status_of(file)["steps"] == status_of(undisturbed)["steps"]
    assert draws(file) == draws(undisturbed)
    assert_same_final_weights(file, undisturbed)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_asynchronous_driver_that_dies_around_the_last_step_goes_on_to_the_same_end(
    tiny_job: MakeJob, ahead: Path, tmp_path: Path
) -> None:
    last = status_of(ahead)["step"]
    points = [f"{point}-{last}" for point in ("begun", "prepared", "taken", "learnt")]
    file = epochs_job(tiny_job, "killed", **AHEAD, **EVALUATED)
    command = [sys.executable, "-m", "tests.training.dying_ahead", str(file), str(tmp_path / "deaths.txt"), *points]
    log, drivers = tmp_path / "log.txt", 1
    while (code := start(command, log).wait()) != 0:
        assert code == -signal.SIGKILL, log.read_text()[-4000:]
        drivers += 1
    assert drivers > 1, "what a group teaches may depend on when it was sampled, and so the number of steps"
    status = status_of(file)
    assert (status["phase"], status["step"]) == ("Succeeded", status["steps"])
    assert PROMPTS <= sum(draws(file)) < PROMPTS + PER_STEP
    begun = sorted((folder_of(file) / "journal").glob("*-begun.json"))
    assert len(begun) == status["steps"], "no rollout begins that no step learns from"


@pytest.mark.nightly
def test_more_epochs_go_on_where_the_data_ended(tiny_job: MakeJob) -> None:
    file = epochs_job(tiny_job, "prolonged")
    run_job(file)
    first = status_of(file)["step"]
    with pytest.raises(JobFinishedError, match=f"all of its {first} steps; .* Raise spec.epochs to continue"):
        run_job(file)
    epochs_job(tiny_job, "prolonged", epochs=2)
    run_job(file)
    assert status_of(file)["step"] == status_of(file)["steps"] > first
    assert 2 * PROMPTS <= sum(draws(file)) < 2 * PROMPTS + PER_STEP
