"""Dynamic sampling in whole jobs: several rounds a step, killed whenever groups are replaced, to the same bits."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.data.traces import read_trace_rows
from tests.training.rounds import rounds_job
from tests.training.whole_jobs import MakeJob, assert_same_final_weights, folder_of, records_of, run_job

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


def metrics_of(file: Path) -> list[dict[str, Any]]:
    """Of each training step."""
    return [record["metrics"] for record in records_of(file) if record["step"]]


@pytest.fixture(scope="module")
def undisturbed(shared_tiny_job: MakeJob) -> Path:
    """A job whose steps take several rounds."""
    file = rounds_job(shared_tiny_job, "undisturbed")
    run_job(file)
    return file


def test_a_step_takes_as_many_rounds_as_it_needs_and_learns_from_what_teaches(undisturbed: Path) -> None:
    for metrics in metrics_of(undisturbed):
        assert metrics["dynamic_sampling/rounds"] >= 2
        assert metrics["dynamic_sampling/replaced_groups"] == metrics["groups"] - 4
        assert metrics["batch/zero_variance_groups"] == 0
        assert metrics["batch/samples"] == 16
    assert all(
        (metrics["lengths/max"], metrics["policy/gradient_norm"]) > (0, 0) for metrics in metrics_of(undisturbed)
    )


def test_every_sample_of_every_round_is_traced_and_charged(undisturbed: Path) -> None:
    rows = read_trace_rows(str(folder_of(undisturbed)))
    of_steps = Counter(rows.step.tolist()) if rows.step is not None else Counter()
    assert of_steps == {step: 4 * metrics["groups"] for step, metrics in enumerate(metrics_of(undisturbed), start=1)}
    keys = list(zip(rows.step.tolist(), rows.prompt.tolist(), rows.sample.tolist(), strict=True))
    assert len(set(keys)) == len(keys)
    visits = {(prompt, step): epoch for prompt, step, epoch in zip(rows.prompt, rows.step, rows.epoch, strict=True)}
    for (prompt, step), visit in visits.items():
        assert visit == sum((prompt, earlier) in visits for earlier in range(1, step))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_killing_everything_whenever_groups_are_replaced_changes_nothing(
    tiny_job: MakeJob, undisturbed: Path, tmp_path: Path
) -> None:
    file, deaths, log = (
        rounds_job(tiny_job, "killed", limits={"retries": 20}),
        tmp_path / "deaths.txt",
        tmp_path / "log",
    )
    command = [sys.executable, "-m", "tests.training.dying_driver", str(file), str(deaths)]
    drivers = 1
    with log.open("ab") as output:
        while (code := subprocess.run(command, stdout=output, stderr=output, check=False).returncode) != 0:
            assert code == -signal.SIGKILL, log.read_text()[-4000:]
            drivers += 1
    assert_same_final_weights(file, undisturbed)
    happened = deaths.read_text().split()
    assert drivers == 1 + sum(death.endswith("-driver") for death in happened) > 1
    for kind in ("generation", "preparation"):
        assert any(death.endswith(kind) for death in happened)
    counted = ("groups", "batch/samples", "dynamic_sampling/rounds", "dynamic_sampling/replaced_groups")
    for killed, whole in zip(metrics_of(file), metrics_of(undisturbed), strict=True):
        assert [killed[name] for name in counted] == [whole[name] for name in counted]
        assert killed["reward"] == pytest.approx(whole["reward"], rel=1e-12)


def test_the_plan_of_a_step_changes_nothing_that_is_learnt(tiny_job: MakeJob, undisturbed: Path) -> None:
    file = rounds_job(tiny_job, "planned", planning={"policy": "cost"}, generation={"instances": {"max": 3}})
    run_job(file)
    assert_same_final_weights(file, undisturbed)


@pytest.mark.slow
def test_a_longer_job_goes_on_behind_the_prompts_of_every_round(tiny_job: MakeJob, undisturbed: Path) -> None:
    file = rounds_job(tiny_job, "prolonged", steps=1)
    run_job(file)
    run_job(rounds_job(tiny_job, "prolonged"))
    assert_same_final_weights(file, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "batch"),
    [
        ({"name": "ppo", "critic": {"warmupSteps": 1}, "dynamicSamplingRounds": 3}, {}),
        pytest.param(
            {"name": "reinforce_plus_plus", "dynamicSamplingRounds": 3},
            {"minibatchSamples": None},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"name": "dapo", "maskTruncated": True}, {}, marks=pytest.mark.nightly),
    ],
    ids=["critic", "whitened", "truncated"],
)
def test_other_algorithms_replace_groups_too(
    tiny_job: MakeJob, algorithm: dict[str, Any], batch: dict[str, Any]
) -> None:
    evaluation = {"data": {"source": "train.jsonl"}, "everySteps": 1}
    file = rounds_job(tiny_job, "job", algorithm=algorithm, batch=batch, evaluation=evaluation)
    run_job(file)
    assert [record["evaluation"] is not None for record in records_of(file)] == [True] * 3
    for metrics in metrics_of(file):
        assert metrics["dynamic_sampling/rounds"] >= 2
        assert metrics["batch/zero_variance_groups"] == 0


def test_where_too_few_prompts_teach_the_batch_is_filled(tiny_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    file = rounds_job(tiny_job, "few", batch={"promptsPerStep": 8})
    run_job(file)
    for metrics in metrics_of(file):
        assert metrics["groups"] == 12, "all that there are"
        assert metrics["batch/samples"] == 32
        assert metrics["batch/zero_variance_groups"] == 2
    assert "no prompt is left, and 2 of them fill the batch" in capsys.readouterr().err
