"""A document whose optimizer or length changes in the middle of a job: the steps that are done keep what they had."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.driver import JobChangedError
from rlhfless_operator.training.stages.changed_settings import _forget_learning
from tests.training.whole_jobs import (
    MakeJob,
    assert_equal_weights,
    assert_same_final_weights,
    final_weights,
    folder_of,
    records_of,
    run_job,
    run_until_a_step_cannot_be_written,
    status_of,
)

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

LINEAR = {"optimizer": {"schedule": "linear"}}


def begin(file: Path, monkeypatch: pytest.MonkeyPatch, *, done: int, learnt: int | None = None) -> None:
    """Run a job until it can't write down the step after `done`; by then `learnt` steps are, or one more than `done`.

    A driver learns the next step while it writes one down.
    """
    published = folder_of(file) / "weights" / f"step-{learnt or done + 1:06d}" / "manifest.json"
    run_until_a_step_cannot_be_written(file, monkeypatch, done + 1, published.exists)
    assert status_of(file)["step"] == done
    assert published.exists(), "learnt, though it was not written down"


def forget_learning(folder: Path, step: int) -> None:
    """Leave nothing of what was learnt in a step; its batch stays."""
    for kind in ("weights", "checkpoints"):
        shutil.rmtree(folder / kind / f"step-{step:06d}", ignore_errors=True)
    (folder / "results" / f"step-{step:06d}" / "learn.json").unlink(missing_ok=True)


def forget_step(folder: Path, step: int) -> None:
    """Leave nothing of a step."""
    for kind in ("weights", "checkpoints", "rollouts", "batches", "results"):
        shutil.rmtree(folder / kind / f"step-{step:06d}", ignore_errors=True)


def test_nothing_is_left_of_a_step_that_other_settings_have_learnt(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path))
    learnt = [
        place(step) for place in (folder.weights, folder.critic, folder.checkpoint, folder.state) for step in (4, 5, 6)
    ]
    kept = [folder.state(3), folder.checkpoint(3)]
    for uri in (*learnt, *kept):
        artifacts.write_bytes(f"{uri}/file", b"x")
    _forget_learning(folder, 4)
    assert [uri for uri in (*learnt, *kept) if artifacts.exists(f"{uri}/file")] == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begun", "changed"),
    [
        pytest.param({}, {"optimizer": {"learningRate": 1e-2}}, marks=pytest.mark.nightly),
        (
            {},
            {"optimizer": {"beta1": 0.5, "beta2": 0.8, "epsilon": 1e-4, "weightDecay": 0.5, "maxGradientNorm": 0.1}},
        ),
        pytest.param(LINEAR, {**LINEAR, "steps": 6}, marks=pytest.mark.nightly),
        pytest.param({}, {"optimizer": {"schedule": "cosine", "warmupSteps": 2}}, marks=pytest.mark.nightly),
    ],
    ids=["learning rate", "all numbers", "length of the schedule", "schedule"],
)
def test_steps_that_are_taken_again_have_the_settings_that_they_were_first_taken_with(
    tiny_job: MakeJob,
    monkeypatch: pytest.MonkeyPatch,
    begun: dict[str, Any],
    changed: dict[str, Any],
) -> None:
    """A learner that takes them again comes to the same bits as one that has a checkpoint of the last of them."""
    ends = {}
    for name, every_steps in (("again", 100), ("checkpoint", 1)):
        begun_here = {"steps": 4, "checkpoints": {"everySteps": every_steps}, **begun}
        begin(tiny_job(name, **begun_here), monkeypatch, done=2, learnt=4)
        file = tiny_job(name, **{**begun_here, **changed})
        if name == "checkpoint":
            forget_learning(folder_of(file), 3)
            forget_step(folder_of(file), 4)
        run_job(file)
        ends[name] = final_weights(file)
    assert_equal_weights(ends["again"], ends["checkpoint"])


@pytest.mark.slow
def test_a_change_holds_from_the_next_step_on_and_is_recorded(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tiny_job(steps=4), monkeypatch, done=2)
    file = tiny_job(steps=4, optimizer={"learningRate": 1e-2})
    run_job(file)
    said = "from step 3 on: spec.optimizer.learningRate 0.001 → 0.01; the steps before keep what they had"
    assert said in capsys.readouterr().err
    rates = [record["metrics"]["policy/learning_rate"] for record in records_of(file)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-2, 1e-2])
    lines = (folder_of(file) / "settings.jsonl").read_text().splitlines()
    spans = [(line["from_step"], line["settings"]["optimizer"]["learning_rate"]) for line in map(json.loads, lines)]
    assert spans == [(1, 1e-3), (3, 1e-2)]
    report = (folder_of(file) / "report.html").read_text()
    assert "From step 3 on: spec.optimizer.learningRate 0.001 → 0.01" in report


@pytest.mark.nightly
def test_a_change_that_is_undone_before_a_step_leaves_no_trace(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = tiny_job("undisturbed", steps=4)
    run_job(undisturbed)
    begin(tiny_job("undone", steps=4), monkeypatch, done=1)
    begin(tiny_job("undone", steps=4, optimizer={"learningRate": 1e-2}), monkeypatch, done=1)
    file = tiny_job("undone", steps=4)
    run_job(file)
    assert_same_final_weights(file, undisturbed)
    assert len((folder_of(file) / "settings.jsonl").read_text().splitlines()) == 1


def test_another_optimizer_is_refused(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tiny_job(steps=2), monkeypatch, done=1)
    with pytest.raises(JobChangedError, match=r"spec\.optimizer\.name changed since this job was begun"):
        run_job(tiny_job(steps=2, optimizer={"name": "muon"}))
