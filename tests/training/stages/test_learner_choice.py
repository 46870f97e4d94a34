"""How many instances learn together is chosen from what steps with different numbers have taken."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.planner.step.learner_scaling import LearnerOption
from rlhfless_operator.records.status import LearnersStatus, RLHFJobStatus
from rlhfless_operator.training.instances.gang import GangSize
from rlhfless_operator.training.stages.learner_choice import choose_learners, offer_learners
from tests.command_line import run_command
from tests.training.costs.test_cost_model import cost_model_of
from tests.training.killing import start
from tests.training.whole_jobs import MakeJob, final_weights, records_of, run_job, status_of

KEPT = "too little is measured to choose another number"


class Job:
    """A job of a hundred steps, each of which ends with a checkpoint. Its plan wants `wanted` instances."""

    def __init__(self, file: Path, *, step_seconds: float = 20.0, wanted: int = 1) -> None:
        self.spec, self.cost_model, self.wanted = load_job(file).spec, cost_model_of(file), wanted
        self.learners = GangSize(self.spec.learning.instances)
        self.prompts = SimpleNamespace(total_steps=100, next=lambda count: list(range(count)))
        self.plans = SimpleNamespace(learners=(), planned_ahead=None, plan_ahead=self.plan_ahead)
        self.notes: list[str] = []
        self.progress = SimpleNamespace(note=self.notes.append)
        self.status, self.records = RLHFJobStatus(), [SimpleNamespace(seconds=step_seconds)]
        self.checkpoint_step = 0
        self.offered: list[LearnerOption] = []

    def plan_ahead(self, prompts: list[int], samples: int) -> Any:
        self.offered = list(self.plans.learners)
        return SimpleNamespace(planned=SimpleNamespace(learners=self.wanted))

    async def update_status(self, learners: LearnersStatus) -> None:
        self.status = self.status.model_copy(update={"learners": learners})

    def took(self, instances: int, seconds: float, steps: int = 2) -> None:
        for _ in range(steps):
            self.cost_model.history.add("learning", seconds)
            self.cost_model.history.add(f"learning/token/{instances}", seconds / 1000)
            self.cost_model.history.add(f"learning/rest/{instances}", 0.5)

    def choose(self, step: int) -> tuple[int, str]:
        run: Any = self
        self.checkpoint_step = step - 1
        asyncio.run(choose_learners(run, run, step))
        return self.learners.now, self.status.learners.reason if self.status.learners else ""


def ranging(tiny_job: MakeJob, least: int = 1, most: int = 4, **planning: Any) -> Path:
    given = {"processes": 1, "instances": {"min": least, "max": most}}
    return tiny_job(learning=given, planning={"policy": "cost", **planning}, checkpoints={"everySteps": 1})


def test_the_most_learn_until_two_steps_have_been_measured(tiny_job: MakeJob) -> None:
    job = Job(ranging(tiny_job))
    job.took(4, 8.0, steps=1)
    assert job.choose(2) == (4, KEPT)
    job.took(4, 8.0, steps=1)
    assert job.choose(3) == (2, "a trial, as only 4 was measured")


def test_a_trial_is_only_made_where_it_can_cost_little(tiny_job: MakeJob) -> None:
    job = Job(ranging(tiny_job))
    job.took(4, 8.0)
    job.prompts.total_steps = 10
    assert job.choose(3) == (4, KEPT)


def test_a_number_that_is_tried_is_kept_until_it_is_known(tiny_job: MakeJob) -> None:
    job = Job(ranging(tiny_job))
    job.took(4, 8.0)
    assert job.choose(3)[0] == 2
    job.took(2, 9.0, steps=1)
    assert job.choose(4)[0] == 2
    job.took(2, 9.0, steps=1)
    found, reason = job.choose(5)
    assert (found, [each.instances for each in job.offered]) == (1, [1, 2, 4])
    assert reason == (
        "1 takes 11 s for 1,000 tokens and 0.5 s besides by the forecast;"
        " 2 take 9 s for 1,000 tokens and 0.5 s besides; 4 take 8 s for 1,000 tokens and 0.5 s besides (λ 0.5)"
    )


def test_nothing_is_chosen_between_checkpoints_or_twice_for_a_step(tiny_job: MakeJob) -> None:
    job = Job(ranging(tiny_job), wanted=2)
    job.took(4, 8.0)
    job.took(2, 8.0)
    run: Any = job
    job.checkpoint_step = 3
    asyncio.run(choose_learners(run, run, 7))
    assert (job.learners.now, job.status.learners) == (4, None)
    assert job.choose(5)[0] == 2
    job.wanted = 4
    assert job.choose(5)[0] == 2, "an earlier driver has chosen"
    assert job.choose(6)[0] == 4


def test_only_the_cost_policy_chooses(tiny_job: MakeJob) -> None:
    job = Job(ranging(tiny_job, policy="even"))
    job.took(4, 8.0)
    job.took(2, 8.0)
    assert job.choose(5) == (4, "")


def test_without_a_range_nothing_is_offered(tiny_job: MakeJob) -> None:
    job = Job(ranging(tiny_job, 2, 2))
    job.took(2, 8.0)
    run: Any = job
    offer_learners(run, run, 5)
    assert job.plans.learners == ()
    assert job.choose(5) == (2, "")


def test_numbers_with_too_little_memory_are_not_tried_again(tiny_job: MakeJob) -> None:
    job = Job(ranging(tiny_job))
    job.cost_model.learners_too_few(2)
    job.took(4, 8.0)
    assert job.choose(5)[0] == 3


STEPS = 8


@pytest.mark.nightly
def test_a_job_with_a_range_tries_measures_and_chooses_and_goes_on_with_what_was_written(
    tiny_job: MakeJob, tmp_path: Path
) -> None:
    """With λ = 1 fewer learners cost only time, so the trial is always made."""
    common: dict[str, Any] = {
        "steps": STEPS,
        "planning": {"policy": "cost", "lambda": 1.0},
        "optimizer": {"learningRate": 1e-3, "epsilon": 1e-3},
        "checkpoints": {"everySteps": 1},
    }
    file = tiny_job("range", learning={"processes": 1, "instances": {"min": 1, "max": 2}}, **common)
    log = tmp_path / "log"
    driver = start(run_command(file), log)
    deadline = time.monotonic() + 600
    written: dict[str, Any] | None = None
    while (written is None or written["instances"] == 2) and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        try:
            written = status_of(file).get("learners")
        except (FileNotFoundError, ValueError):
            continue
    driver.kill()
    driver.wait()
    assert written is not None, log.read_text()
    assert (written["instances"], written["reason"]) == (1, "a trial, as only 2 was measured")

    summary = run_job(file)
    assert (summary["phase"], summary["steps"]) == ("Succeeded", STEPS)
    metrics = [record["metrics"] for record in records_of(file)]
    counts = [each["learning/instances"] for each in metrics]
    trial = written["step"]
    assert set(counts[: trial - 1]) == {2}
    assert counts[trial - 1] == 1, "the next driver goes on with what was written"
    assert counts == [each["learning/instances_chosen"] for each in metrics]
    chosen = status_of(file)["learners"]
    assert counts[-1] == chosen["instances"]
    assert "1 takes" in chosen["reason"] and "2 take" in chosen["reason"], "both numbers were measured"

    alone = tiny_job("alone", learning={"processes": 1}, **common)
    run_job(alone)
    first, second = final_weights(file), final_weights(alone)
    for name, tensor in first.items():
        assert (tensor - second[name]).abs().max() <= 1e-6 * STEPS, name
