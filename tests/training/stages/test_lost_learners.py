"""Learners that are lost or let go: whether their successors wait for pieces, and what a successor costs."""

import asyncio
import math
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_functions.api import Done, Event, LearnRequest, LearnResult, Started, TaskKey, WeightsReference
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.step.generation import GroupForecast
from rlhfless_operator.planner.step.pace import LearnerPace
from rlhfless_operator.platforms.base import InstanceLostError
from rlhfless_operator.training.instances.weights_traffic import WeightsTraffic
from rlhfless_operator.training.stages import learning
from rlhfless_operator.training.stages.learning import Learning
from rlhfless_operator.training.stages.state_saving import StateSaving
from tests.jobs import small_job

PATIENCE = 30.0
BATCH: Any = SimpleNamespace(step=1, count=0)


class Step:
    """A step whose first piece is prepared, and whose first learner works until it is killed.

    Args:
        sleeps: whether stages take turns.
        watched: whether the watch of a rollout lets learners go, and saves their state before.
    """

    def __init__(self, *, sleeps: bool = True, watched: bool = False) -> None:
        self.room = True
        """Whether a learner has GPUs beside the instances at work."""
        self.waits: list[bool] = []
        """What each request says of waiting for pieces."""
        self.restarts: list[float] = []
        """Seconds that a successor of the learner is said to need."""
        self.works, self.killed = asyncio.Event(), asyncio.Event()
        journal = SimpleNamespace(
            batches_since_checkpoint=lambda step: [],
            checkpoint_step=0,
            ledger=None,
            settings=None,
            status=SimpleNamespace(checkpoint=None),
        )
        run = SimpleNamespace(
            capacity=SimpleNamespace(
                sleeps=sleeps, stays=False, holds=lambda stage: True, has_room=self._has_room, use=self._use
            ),
            cost_model=SimpleNamespace(
                learner_pace=lambda *_, **__: LearnerPace(0.0, math.inf),
                learned=lambda learned: None,
                letting_go_seconds=lambda steps: 1.0,
                restart_seconds=lambda steps: 100.0 * steps,
            ),
            follows_forecasts=watched,
            learner_preload=None,
            learners=SimpleNamespace(now=1, chosen=1, met=lambda count: None),
            platform=SimpleNamespace(run=self._run),
            progress=SimpleNamespace(stage=lambda *_, **__: None, over=lambda *_: None),
            prompts=SimpleNamespace(planned_steps=1, total_steps=1),
            requests=SimpleNamespace(gang=lambda step, count: [None], learn=self._learn),
            spec=RLHFJob.model_validate(small_job(planning={"policy": "cost"})).spec,
            weights_traffic=WeightsTraffic(),
        )
        saving = StateSaving(run, journal)  # type: ignore[arg-type]
        self.learning = Learning(run, journal, 1, saving)  # type: ignore[arg-type]
        # Half of the groups are there.
        groups = range(run.spec.batch.prompts_per_step // 2)
        piece = SimpleNamespace(samples=[SimpleNamespace(prompt=prompt) for prompt in groups])
        plan = SimpleNamespace(planned=SimpleNamespace(groups=None if sleeps else GroupForecast({}, {}, 0.0)))
        pieces = SimpleNamespace(pieces=[piece], folder="")
        self.learning.expect(BATCH, plan, pieces)  # type: ignore[arg-type]

    def _has_room(self, stage: str) -> bool:
        return self.room

    async def _use(self, *_: Any, restart_seconds: float = 0.0, **__: Any) -> None:
        self.restarts.append(restart_seconds)

    def _learn(self, *_: Any, attempt: int, **__: Any) -> LearnRequest:
        key = TaskKey(job_uid="u", step=1, stage="learning", part="learn", attempt=attempt)
        return LearnRequest.model_construct(key=key, heartbeat_seconds=5.0)

    async def _run(self, request: LearnRequest) -> AsyncGenerator[Event, None]:
        self.waits.append(request.waits)
        yield Started(instance="learner")
        if len(self.waits) == 1:
            self.works.set()
            await self.killed.wait()
            raise InstanceLostError("killed")
        yield Done(result=LearnResult(weights=WeightsReference(version=1, uri=""), metrics={}).model_dump())


async def test_a_learner_that_is_lost_once_the_batch_is_there_comes_back_as_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learning, "RETRY_SECONDS", 0.0)
    step = Step()
    async with asyncio.timeout(PATIENCE), step.learning:
        await step.works.wait()
        await step.learning.begin(BATCH)
        step.killed.set()
        await step.learning.result()
    assert step.waits == [False, True]


async def test_a_batch_that_is_there_while_a_lost_learner_is_to_come_back_is_learnt_from_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = asyncio.Event()
    monkeypatch.setattr(learning, "RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(learning, "check_retry", lambda *_: pauses.set())
    step = Step()
    async with asyncio.timeout(PATIENCE), step.learning:
        await step.works.wait()
        step.killed.set()
        await pauses.wait()
        await step.learning.begin(BATCH)
        await step.learning.result()
    assert step.waits == [False, True]


@pytest.mark.parametrize("sleeps", [True, False])
async def test_a_learner_is_asked_for_once_it_takes_no_gpu_that_others_wait_for(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    looked = asyncio.Event()
    monkeypatch.setattr(learning, "LOOK_SECONDS", 0.0)
    step = Step(sleeps=sleeps)
    step.room = False

    def looks(stage: str) -> bool:
        looked.set()
        return step.room

    step.learning._run.capacity.has_room = looks  # type: ignore[method-assign]
    async with asyncio.timeout(PATIENCE), step.learning:
        await looked.wait()
        assert step.learning.has_work_in(math.inf) == math.inf
        assert not step.waits
        step.room = True
        await step.works.wait()
    assert step.waits == [not sleeps]


@pytest.mark.parametrize(("watched", "seconds"), [(True, 1.0), (False, 100.0)])
async def test_only_a_learner_whose_state_is_saved_is_let_go_as_cheaply_as_that(
    watched: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous job saves no state. So a fresh learner repeats all steps since the checkpoint."""
    monkeypatch.setattr(learning, "RETRY_SECONDS", 0.0)
    step = Step(watched=watched)
    async with asyncio.timeout(PATIENCE), step.learning:
        step.killed.set()
        await step.learning.begin(BATCH)
        await step.learning.result()
    assert step.restarts[-1] == seconds
