"""The learning stage: one request, from a batch to the next weights version; it may begin before the batch is there."""

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rlhfless_functions.api import BatchReference, Event, LearnResult, Started, Waiting
from rlhfless_functions.artifacts import join
from rlhfless_operator.platforms.base import InstanceState, StateChange
from rlhfless_operator.training.planning import GenerationPlan
from rlhfless_operator.training.preparation import chunks_of
from rlhfless_operator.training.rollout import Rollout
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.tasks import run_to_end


class EarlyLearning:
    """The learning of one step while its batch is still being prepared: begun when the plan says, and cut if the step
    fails."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._task: asyncio.Task[LearnResult] | None = None
        self.begun = False
        """Whether a learner has been asked."""

    def expect(self, batch: BatchReference, plan: GenerationPlan) -> None:
        """Generation begins.

        Args:
            batch: its samples in canonical order, and the parts that an earlier driver had prepared.
            plan: says when to begin; never, where nothing is gained.
        """
        if math.isfinite(plan.learning_begins):
            self._task = asyncio.create_task(self._learn(batch, plan.learning_begins))

    def call_off(self) -> None:
        """Don't begin any more."""
        if self._task is not None and not self.begun:
            self._task.cancel()

    async def result(self) -> LearnResult:
        """What it comes to, once it has begun.

        Raises:
            StageFailedError: the step can't be taken.
        """
        assert self._task is not None
        return await self._task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _learn(self, batch: BatchReference, after_seconds: float) -> LearnResult:
        await asyncio.sleep(after_seconds)
        self.begun = True
        run = self._run
        following = join(run.folder.batches(batch.step, "training"), chunks_of(run.lease.number))
        return await _take_step(run, batch, following=following)


async def learn(run: TrainingRun, rollout: Rollout, early: EarlyLearning) -> LearnResult:
    """Take the step. A learner that lost its memory replays the batches since the newest checkpoint.

    Args:
        early: the same, where it has begun already.

    Raises:
        StageFailedError: the step can't be taken, for a loss that is not finite for one.
    """
    run.progress.stage("learning")
    batch = rollout.batch
    looked_ahead = False

    def look_ahead(event: Event | None = None) -> None:
        # While the learner works there is time for what a step has taught, and to plan.
        nonlocal looked_ahead
        if not looked_ahead:
            looked_ahead = True
            run.cost_model.measured(rollout.record.lengths)
            run.look_ahead(batch.step)

    if early.begun:
        began = time.monotonic()
        look_ahead()
        learned = await early.result()
        beyond = {"learning/beyond_preparation": time.monotonic() - began}
        learned = learned.model_copy(update={"metrics": {**learned.metrics, **beyond}})
    else:
        early.call_off()
        learned = await _take_step(run, batch, on_event=look_ahead)
    # Unless it is kept, its successor takes the steps since the newest checkpoint again.
    again = 0 if learned.checkpoint is not None else batch.step - _checkpoint_step(run)
    run.cost_model.learned(learned)
    await run.capacity.use("learning", 0, restart_seconds=run.cost_model.restart_seconds(again))
    return learned


async def _take_step(
    run: TrainingRun,
    batch: BatchReference,
    *,
    following: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> LearnResult:
    await run.capacity.use("learning", 1, run.learner_preload)
    replay = [run.batch_of(step) for step in range(_checkpoint_step(run) + 1, batch.step)]
    instance = ""

    def hear(event: Event) -> None:
        nonlocal instance
        if isinstance(event, Started):
            instance = event.instance
        elif isinstance(event, Waiting):
            # It holds its GPU for nothing, and that is what the ledger shall say.
            state: InstanceState = "idle" if event.waiting else "busy"
            run.ledger.observe(StateChange(instance, "learning", state, time.monotonic()))
        on_event(event)

    result = await run_to_end(
        run.platform,
        lambda attempt: run.requests.learn(
            run.status,
            batch,
            replay,
            run.total_steps,
            checkpoint_due=run.checkpoint_due(batch.step),
            attempt=attempt,
            following=following,
        ),
        retries=run.spec.limits.retries,
        on_event=hear,
    )
    return LearnResult.model_validate(result)


def _checkpoint_step(run: TrainingRun) -> int:
    return run.status.checkpoint.step if run.status.checkpoint else 0
