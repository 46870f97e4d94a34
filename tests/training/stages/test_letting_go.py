"""Whether a learner stays between two steps, and what becomes of its state."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_functions.api import Done, Event, SaveRequest, SaveResult, Started
from rlhfless_operator.platforms.base import InstanceLostError, StateChange
from rlhfless_operator.records.status import CheckpointStatus
from rlhfless_operator.training.stages.letting_go import LettingGo
from rlhfless_operator.training.stages.state_saving import StateSaving

SWITCH = 10.0


class Job:
    """A job whose learner holds version 3, with a checkpoint of step 1."""

    def __init__(self, *, saves: bool = True, learners: int = 1, lost: bool = False) -> None:
        self.let_go_at: list[str] = []
        self.saved: list[CheckpointStatus] = []
        self.states: list[str] = []
        self.seconds: list[float] = []
        self.notes: list[str] = []
        self.idle, self.lost, self.may_end = True, lost, asyncio.Event()
        self.may_end.set()
        self.status = SimpleNamespace(step=3)
        journal = SimpleNamespace(
            status=self.status,
            checkpoint_step=1,
            ledger=SimpleNamespace(observe=self._observe),
            saved=self.saved.append,
        )
        run = SimpleNamespace(
            capacity=SimpleNamespace(
                has_idle=lambda stage: self.idle, switch_seconds=lambda stage: SWITCH, let_go=self._let_go
            ),
            cost_model=SimpleNamespace(saves_state=lambda steps: saves and steps == 2, saved=self.seconds.append),
            learners=SimpleNamespace(now=learners),
            requests=SimpleNamespace(save=self._request),
            platform=SimpleNamespace(run=self._run),
            folder=SimpleNamespace(state=lambda step: f"c-{step}"),
            progress=SimpleNamespace(note=self.notes.append),
        )
        self.saving = StateSaving(run, journal)  # type: ignore[arg-type]
        self.letting_go = LettingGo(run, self.saving, 3)  # type: ignore[arg-type]

    def _observe(self, change: StateChange) -> None:
        self.states.append(change.state)

    def _request(self, version: int, uri: str, attempt: int) -> Any:
        return SaveRequest.model_construct(version=version, checkpoint=uri)

    async def _run(self, request: SaveRequest) -> AsyncGenerator[Event, None]:
        yield Started(instance="learner", cold_start=None)
        await self.may_end.wait()
        if self.lost:
            raise InstanceLostError("it is gone")
        result = SaveResult(checkpoint=request.checkpoint, seconds=4.0)
        yield Done(result=result.model_dump())

    async def _let_go(self, stage: str) -> None:
        self.let_go_at.append(stage)
        self.idle = False

    async def ends(self) -> None:
        while self.letting_go.is_under_way:
            await asyncio.sleep(0)


async def test_a_learner_with_work_soon_or_at_work_stays() -> None:
    job = Job()
    assert not job.letting_go.consider(SWITCH)
    job.idle = False
    assert not job.letting_go.consider(10 * SWITCH)
    assert job.let_go_at == []


async def test_a_learner_whose_work_is_far_saves_its_state_and_is_let_go() -> None:
    job = Job()
    assert job.letting_go.consider(SWITCH + 1)
    await job.ends()
    assert (job.saved, job.let_go_at) == ([CheckpointStatus(step=3, uri="c-3")], ["learning"])
    assert job.states == ["switching"], "saving is no work on the step"
    assert job.seconds == [4.0]
    assert not job.letting_go.consider(SWITCH + 1)


async def test_it_stays_until_the_state_is_saved() -> None:
    job = Job()
    job.may_end.clear()
    assert job.letting_go.consider(SWITCH + 1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert job.letting_go.consider(SWITCH + 1), "under way"
    assert job.let_go_at == []
    job.may_end.set()
    await job.ends()
    assert job.let_go_at == ["learning"]


@pytest.mark.parametrize("kind", [{"saves": False}, {"learners": 2}], ids=["repeating is cheaper", "a gang"])
async def test_a_state_is_not_saved_where_repeating_is_cheaper_or_it_is_divided(kind: dict[str, Any]) -> None:
    job = Job(**kind)
    job.letting_go.consider(SWITCH + 1)
    await job.ends()
    assert (job.saved, job.let_go_at) == ([], ["learning"])


async def test_a_state_that_cannot_be_saved_is_noted_and_its_steps_are_repeated() -> None:
    job = Job(lost=True)
    job.letting_go.consider(SWITCH + 1)
    await job.ends()
    assert (job.saved, job.let_go_at) == ([], ["learning"])
    assert job.notes == ["step 3: the learner's state is not saved, so its steps are repeated: it is gone"]


async def test_a_checkpoint_is_named_once_its_step_is_written_down() -> None:
    """During an evaluation the step is not written down yet."""
    job = Job()
    job.status.step = 2
    job.letting_go.learnt(3)
    job.letting_go.consider(SWITCH + 1)
    await job.ends()
    assert job.saved == []
    job.status.step = 3
    job.saving.written_down()
    job.saving.written_down()
    assert job.saved == [CheckpointStatus(step=3, uri="c-3")]


async def test_a_driver_that_ends_leaves_no_task_behind() -> None:
    job = Job()
    job.may_end.clear()
    async with job.letting_go:
        job.letting_go.consider(SWITCH + 1)
    assert not job.letting_go.is_under_way
