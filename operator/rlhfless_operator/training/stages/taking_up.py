"""The loading of a fresh learner's state beside the end of generation, so that it is there when the batch is."""

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import Self

from rlhfless_functions.api import BatchReference, Done, Started, TakeUpRequest, TakeUpResult
from rlhfless_operator.platforms.base import InstanceLostError, StateChange, TaskFailedError
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun


class TakingUp:
    """Starts the learner of one step so early that its state is in memory when the batch is complete.

    If that fails, the request for the step loads the state, or reports why it can't.

    Args:
        run: the job in hand.
        journal: its status names the checkpoint.
        step: the step's number.
        has_begun: whether a learner was requested for the step itself.
    """

    def __init__(self, run: TrainingRun, journal: StepJournal, step: int, has_begun: Callable[[], bool]) -> None:
        self._run = run
        self._journal = journal
        self._step = step
        self._has_begun = has_begun
        self._task: asyncio.Task[None] | None = None
        self._begun = False
        self.metrics: dict[str, float] = {}
        """Metrics of the step, if the state was loaded ahead."""

    @property
    def is_under_way(self) -> bool:
        """A learner starts or loads."""
        return self._begun and self._task is not None and not self._task.done()

    def consider(self, within: float) -> bool:
        """Begin so early that a learner has its state in so many seconds, unless there is one. A later call corrects it
        until then.

        Return whether a learner starts or loads.
        """
        if self._begun:
            return self.is_under_way
        run = self._run
        again = self._step - 1 - self._journal.checkpoint_step
        loading = run.cost_model.taking_up_seconds(again)
        alone = run.learners.now == 1 and not run.spec.chooses_learners
        if not alone or not loading:
            return False
        if self._task is not None:
            self._task.cancel()
        # Looks may be far between.
        early = within - run.capacity.startup_seconds("learning") - loading
        self._begun = early <= 0 and self._may_begin()
        self._task = asyncio.create_task(self._begin_in(max(0.0, early), again))
        return self._begun

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _may_begin(self) -> bool:
        return not self._has_begun() and not self._run.capacity.holds("learning")

    async def _begin_in(self, seconds: float, again: int) -> None:
        await asyncio.sleep(seconds)
        self._begun = self._begun or self._may_begin()
        if self._begun:
            await self._take_up(again)

    async def _take_up(self, again: int) -> None:
        run, journal, step = self._run, self._journal, self._step
        batch = BatchReference(step=step, parts=[], samples=[])
        replay = await asyncio.to_thread(journal.batches_since_checkpoint, step)
        learn = run.requests.learn(
            journal.status,
            batch,
            replay,
            journal.settings,
            run.prompts.planned_steps,
            checkpoint_due=False,
            attempt=0,
        )
        request = TakeUpRequest(
            key=learn.key.model_copy(update={"part": "take-up"}),
            # A learner of a later driver is to load it, too.
            result=run.folder.result(f"take-up-{uuid.uuid4().hex}", step),
            heartbeat_seconds=learn.heartbeat_seconds,
            step=learn,
        )
        if self._has_begun():
            return
        await run.capacity.use("learning", 1, run.learner_preload)
        try:
            async with aclosing(run.platform.run(request)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        # No work on the step: it counts as waking does.
                        change = StateChange(event.instance, "learning", "switching", time.monotonic())
                        journal.ledger.observe(change)
                    elif isinstance(event, Done):
                        result = TakeUpResult.model_validate(event.result)
                        run.cost_model.taken_up(result.load_seconds)
                        self.metrics["seconds/taken_up"] = result.load_seconds + result.replay_seconds
        except (InstanceLostError, TaskFailedError) as error:
            run.progress.note(f"step {step}: the learner's state is not loaded ahead: {error}")
            if not self._has_begun():
                await run.capacity.give_up("learning", 1)
            return
        if not self._has_begun():
            restart = run.cost_model.restart_seconds(again)
            await run.capacity.use("learning", 0, restart_seconds=restart, undecided=True)
