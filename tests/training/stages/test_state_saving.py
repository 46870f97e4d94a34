"""Checkpoints that a learner writes between two steps, beside the generation of the second."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_functions.api import Done, Event, SaveRequest, SaveResult, Started
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.base import InstanceLostError
from rlhfless_operator.records.status import CheckpointStatus
from rlhfless_operator.training.stages.state_saving import StateSaving
from tests.jobs import small_job

EVERY, STEPS = 2, 7


class Job:
    """A job that has learnt a step, with a checkpoint of an earlier one."""

    def __init__(self, *, checkpoint: int = 0, written: int = 0, learners: int = 1, takes_turns: bool = False) -> None:
        self.uses: list[tuple[int, float]] = []
        """Learners at work, and the seconds that a fresh one would need."""
        self.saved: list[CheckpointStatus] = []
        self.notes: list[str] = []
        self.lost, self.may_end = False, asyncio.Event()
        self.journal = SimpleNamespace(
            status=SimpleNamespace(step=written), checkpoint_step=checkpoint, saved=self._named, ledger=None
        )
        spec = RLHFJob.model_validate(small_job(checkpoints={"everySteps": EVERY})).spec
        run = SimpleNamespace(
            capacity=SimpleNamespace(use=self._use),
            cost_model=SimpleNamespace(
                saved=lambda seconds: None,
                letting_go_seconds=lambda steps: 10.0 * steps,
                restart_seconds=lambda steps: 100.0 * steps,
            ),
            folder=SimpleNamespace(checkpoint=lambda step: f"c-{step}"),
            follows_forecasts=not takes_turns,
            learners=SimpleNamespace(now=learners, chosen=learners),
            platform=SimpleNamespace(run=self._run),
            progress=SimpleNamespace(note=self.notes.append),
            prompts=SimpleNamespace(total_steps=STEPS),
            requests=SimpleNamespace(save=self._request),
            spec=spec,
        )
        self.saving = StateSaving(run, self.journal)  # type: ignore[arg-type]

    def _request(self, version: int, uri: str, attempt: int) -> Any:
        return SaveRequest.model_construct(version=version, checkpoint=uri)

    def _named(self, checkpoint: CheckpointStatus) -> None:
        self.saved.append(checkpoint)
        self.journal.checkpoint_step = checkpoint.step

    async def _use(self, stage: str, count: int, *, restart_seconds: float, undecided: bool) -> None:
        self.uses.append((count, restart_seconds))

    async def _run(self, request: SaveRequest) -> AsyncGenerator[Event, None]:
        yield Started(instance="learner", cold_start=None)
        await self.may_end.wait()
        if self.lost:
            raise InstanceLostError("it is gone")
        yield Done(result=SaveResult(checkpoint=request.checkpoint, seconds=4.0).model_dump())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_checkpoint_is_written_after_its_step_and_named_once_that_is_written_down() -> None:
    job = Job()
    assert not job.saving.learner_writes(EVERY)
    await job.saving.learnt(EVERY, None)
    await settle()
    assert job.uses == [], "the learner is at work"
    job.may_end.set()
    await settle()
    assert job.uses == [(0, 0.0)], "nothing would be repeated"
    assert job.saved == []
    job.journal.status.step = EVERY
    job.saving.written_down()
    assert job.saved == [CheckpointStatus(step=EVERY, uri="c-2")]
    assert job.saving.take_metrics() == {"seconds/checkpoint": 4.0}
    assert job.saving.take_metrics() == {}


async def test_the_next_learning_waits_for_it_and_keeps_the_learner() -> None:
    job = Job(written=EVERY)
    await job.saving.learnt(EVERY, None)
    waiting = asyncio.create_task(job.saving.checkpoint_written())
    await settle()
    assert not waiting.done()
    job.may_end.set()
    await waiting
    assert job.saved == [CheckpointStatus(step=EVERY, uri="c-2")]
    assert job.uses == []
    assert job.saving.take_metrics().keys() == {"seconds/checkpoint", "seconds/checkpoint_wait"}


async def test_one_that_could_not_be_written_is_written_with_the_next_step() -> None:
    job = Job(written=EVERY)
    job.lost = True
    job.may_end.set()
    await job.saving.learnt(EVERY, None)
    await settle()
    assert job.notes == ["step 2: the learner's state is not saved, so its steps are repeated: it is gone"]
    assert job.uses == [(0, 20.0)]
    assert job.saving.learner_writes(EVERY + 1)
    await job.saving.learnt(EVERY + 1, "c-3")
    assert job.uses == [(0, 20.0), (0, 0.0)]


@pytest.mark.parametrize("step", [1, 3, 5])
async def test_after_other_steps_the_learner_is_let_go_unless_it_is_worth_keeping(step: int) -> None:
    job = Job(checkpoint=step - 1, written=step - 1)
    assert not job.saving.learner_writes(step)
    await job.saving.learnt(step, None)
    assert job.uses == [(0, 10.0)]


@pytest.mark.parametrize("kind", [{"learners": 2}, {"takes_turns": True}], ids=["several learners", "turns"])
async def test_it_is_written_with_its_step_where_the_learner_has_no_time_afterwards(kind: dict[str, Any]) -> None:
    job = Job(**kind)
    assert [step for step in range(1, STEPS + 1) if job.saving.learner_writes(step)] == [2, 4, 6, 7]
    await job.saving.learnt(EVERY, "c-2")
    assert job.uses == [(0, 0.0)]


async def test_that_of_the_last_step_is_written_with_it() -> None:
    assert Job(checkpoint=6).saving.learner_writes(STEPS)


async def test_a_driver_that_ends_leaves_no_task_behind() -> None:
    job = Job()
    async with job.saving:
        await job.saving.learnt(EVERY, None)
        await settle()
    await job.saving.checkpoint_written()
    assert job.uses == []
