"""The end of a learner that would stand idle: its state is saved first, if that is cheaper than to repeat its steps."""

import asyncio
import time
from contextlib import aclosing
from typing import Self

from rlhfless_functions.api import Done, SaveResult, Started
from rlhfless_operator.platforms.base import InstanceLostError, StateChange, TaskFailedError
from rlhfless_operator.records.status import CheckpointStatus
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun


class LettingGo:
    """Decides, between two steps, whether the learner stays.

    A learner that is kept costs its idle time. One that is let go costs a start, and a fresh one reads the newest
    checkpoint and repeats the steps since. If the state is saved first, no step is repeated.

    Args:
        run: the job in hand.
        journal: its status names the checkpoint.
    """

    def __init__(self, run: TrainingRun, journal: StepJournal) -> None:
        self._run = run
        self._journal = journal
        self._task: asyncio.Task[None] | None = None
        self._attempts = 0
        self._version = journal.status.step
        """Version that the learner holds."""
        self._saved: CheckpointStatus | None = None
        """Checkpoint of a step that is not written down yet."""

    def learnt(self, step: int) -> None:
        """Note that the learner holds the version of a step."""
        self._version = step

    def written_down(self) -> None:
        """Note that the newest step is written down: its checkpoint may be named."""
        saved, journal = self._saved, self._journal
        if saved is not None and saved.step <= journal.status.step:
            self._saved = None
            if saved.step > journal.checkpoint_step:
                journal.saved(saved)

    @property
    def is_under_way(self) -> bool:
        """Whether a learner is being let go."""
        return self._task is not None and not self._task.done()

    def consider(self, within: float) -> bool:
        """Begin to let the learner go if its next step is so many seconds away that a switch is cheaper.

        Return whether a learner is being let go.
        """
        capacity = self._run.capacity
        if not self.is_under_way and capacity.has_idle("learning") and within > capacity.switch_seconds("learning"):
            self._task = asyncio.create_task(self._let_go())
        return self.is_under_way

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _let_go(self) -> None:
        run, journal = self._run, self._journal
        step, again = self._version, self._version - journal.checkpoint_step
        if run.learners.now == 1 and again and run.cost_model.saves_state(again):
            await self._save(step)
        await run.capacity.let_go("learning")

    async def _save(self, step: int) -> None:
        """Have the learner write its state. If it can't, a fresh one repeats the steps."""
        run, journal = self._run, self._journal
        request = run.requests.save(step, self._attempts)
        self._attempts += 1
        try:
            async with aclosing(run.platform.run(request)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        # Saving is no work on the step. It counts as the switch to sleep does.
                        at = time.monotonic()
                        journal.ledger.observe(StateChange(event.instance, "learning", "switching", at))
                    elif isinstance(event, Done):
                        saved = SaveResult.model_validate(event.result)
                        run.cost_model.saved(saved.seconds)
                        self._saved = CheckpointStatus(step=step, uri=saved.checkpoint)
                        self.written_down()
        except (InstanceLostError, TaskFailedError) as error:
            run.progress.note(f"step {step}: the learner's state is not saved, so its steps are repeated: {error}")
