"""When a fresh learner is asked to load its state, and what becomes of it."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_functions.api import Done, Event, Started, TakeUpResult, TaskKey
from rlhfless_operator.platforms.base import InstanceLostError, StateChange
from rlhfless_operator.training.stages import taking_up
from rlhfless_operator.training.stages.taking_up import TakingUp

START, LOAD = 2.0, 5.0


class Job:
    """A job at step 4, with a checkpoint of step 3, a learner that starts in 2 s and loads in 5 s, and none there."""

    def __init__(self, *, learners: int = 1, chooses: bool = False, load: float = LOAD, lost: bool = False) -> None:
        self.uses: list[tuple[str, int]] = []
        self.states: list[str] = []
        self.notes: list[str] = []
        self.loads: list[float] = []
        self.there = self.begun = False
        self.lost, self.may_end = lost, asyncio.Event()
        self.may_end.set()
        journal = SimpleNamespace(
            checkpoint_step=3,
            status=None,
            settings=None,
            ledger=SimpleNamespace(observe=self._observe),
            batches_since_checkpoint=lambda step: [],
        )
        run = SimpleNamespace(
            capacity=SimpleNamespace(
                holds=lambda stage: self.there,
                startup_seconds=lambda stage: START,
                use=self._use,
                give_up=self._give_up,
            ),
            cost_model=SimpleNamespace(
                restart_seconds=lambda steps: load + steps,
                taking_up_seconds=lambda steps: load + steps,
                taken_up=self.loads.append,
            ),
            learners=SimpleNamespace(now=learners),
            learner_preload=None,
            requests=SimpleNamespace(learn=self._learn),
            folder=SimpleNamespace(result=lambda name, step: f"results/{name}"),
            platform=SimpleNamespace(run=self._run),
            progress=SimpleNamespace(note=self.notes.append),
            prompts=SimpleNamespace(planned_steps=9),
            spec=SimpleNamespace(chooses_learners=chooses),
        )
        self.taking_up = TakingUp(run, journal, 4, lambda: self.begun)  # type: ignore[arg-type]

    def _learn(self, *arguments: Any, **named: Any) -> Any:
        key = TaskKey(job_uid="u", step=4, stage="learning", part="learn", attempt=0)
        return SimpleNamespace(key=key, heartbeat_seconds=5.0)

    async def _use(self, stage: str, count: int, *rest: Any, **named: Any) -> None:
        self.uses.append((stage, count))

    async def _give_up(self, stage: str, count: int) -> None:
        self.uses.append((stage, -count))

    def _observe(self, change: StateChange) -> None:
        self.states.append(change.state)

    async def _run(self, request: Any) -> AsyncGenerator[Event, None]:
        yield Started(instance="learner", cold_start=None)
        await self.may_end.wait()
        if self.lost:
            raise InstanceLostError("it is gone")
        yield Done(result=TakeUpResult(load_seconds=4.0, replay_seconds=1.0).model_dump())

    async def ends(self) -> None:
        while self.taking_up.is_under_way:
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking_up, "TakeUpRequest", lambda **fields: SimpleNamespace(**fields))


async def test_it_begins_as_long_before_the_batch_as_a_start_and_the_loading_take() -> None:
    job = Job()
    assert not job.taking_up.consider(START + LOAD + 100.0)
    await asyncio.sleep(0.01)
    assert job.uses == []
    assert job.taking_up.consider(START + LOAD)
    await job.ends()
    assert job.uses == [("learning", 1), ("learning", 0)], "it waits for its batch without work"
    assert job.taking_up.metrics == {"seconds/taken_up": 5.0}
    assert job.loads == [4.0]
    assert job.states == ["switching"], "loading is no work on the step"
    assert not job.taking_up.consider(0.0), "once a step"


async def test_it_needs_no_further_look_to_begin() -> None:
    job = Job()
    assert not job.taking_up.consider(START + LOAD + 0.01)
    await asyncio.sleep(0.1)
    await job.ends()
    assert job.taking_up.metrics == {"seconds/taken_up": 5.0}


async def test_it_does_not_begin_once_the_step_has_a_learner() -> None:
    job = Job()
    job.taking_up.consider(START + LOAD + 0.01)
    job.begun = True
    await asyncio.sleep(0.1)
    assert job.uses == []


async def test_it_ends_if_the_step_asks_for_a_learner_while_the_batches_are_read() -> None:
    job = Job()
    assert job.taking_up.consider(0.0)
    job.begun = True
    await job.ends()
    assert job.uses == [] and job.states == []


@pytest.mark.parametrize(
    "kind", [{"learners": 2}, {"chooses": True}, {"load": 0.0}], ids=["a gang", "a choice", "nothing is known"]
)
async def test_it_is_left_to_the_step_where_it_is_not_one_learner_or_nothing_is_known(kind: dict[str, Any]) -> None:
    job = Job(**kind)
    assert not job.taking_up.consider(0.0)
    assert job.uses == []


async def test_a_learner_that_is_there_has_its_state() -> None:
    job = Job()
    job.there = True
    assert not job.taking_up.consider(0.0)


async def test_a_learner_that_has_been_asked_for_the_step_meanwhile_keeps_its_work() -> None:
    job = Job()
    job.may_end.clear()
    job.taking_up.consider(0.0)
    for _ in range(5):
        await asyncio.sleep(0.01)
    job.begun = True
    job.may_end.set()
    await job.ends()
    assert job.uses == [("learning", 1)]


async def test_a_learner_that_is_lost_is_given_up_and_noted() -> None:
    job = Job(lost=True)
    job.taking_up.consider(0.0)
    await job.ends()
    assert job.uses == [("learning", 1), ("learning", -1)]
    assert job.notes == ["step 4: the learner's state is not loaded ahead: it is gone"]
    assert job.taking_up.metrics == {}


async def test_a_step_that_ends_leaves_no_task_behind() -> None:
    job = Job()
    job.may_end.clear()
    async with job.taking_up:
        job.taking_up.consider(0.0)
    assert not job.taking_up.is_under_way
