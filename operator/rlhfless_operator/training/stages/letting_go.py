"""The end of a learner that would stand idle: its state is saved first, if that is cheaper than to repeat its steps."""

import asyncio
from typing import Self

from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.state_saving import StateSaving


class LettingGo:
    """Decides, between two steps, whether the learner stays.

    A learner that is kept costs its idle time. One that is let go costs a start, and a fresh one reads the newest
    checkpoint and repeats the steps since. If the state is saved first, no step is repeated.

    Args:
        run: the job in hand.
        saving: saves the state.
        version: the version that the learner holds.
    """

    def __init__(self, run: TrainingRun, saving: StateSaving, version: int) -> None:
        self._run = run
        self._saving = saving
        self._version = version
        self._task: asyncio.Task[None] | None = None

    def learnt(self, step: int) -> None:
        """Note that the learner holds the version of a step."""
        self._version = step

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
        run, saving, step = self._run, self._saving, self._version
        again = step - saving.saved_step
        if run.learners.now == 1 and again and run.cost_model.saves_state(again):
            await saving.save(step, run.folder.state(step), is_work=False)
        await run.capacity.let_go("learning")
