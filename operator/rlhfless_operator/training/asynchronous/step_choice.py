"""The choice of a step's groups, in the background. A learner may begin before the step has all of them."""

import asyncio
from dataclasses import dataclass

from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.training.asynchronous.rollouts_ahead import RolloutsAhead
from rlhfless_operator.training.journal.async_journal import AsyncJournal, TakenStep, whole_rollout


@dataclass(frozen=True)
class ChosenStep:
    """The groups that a step learns from."""

    taken: TakenStep
    whole: StepBatch | None = None
    """The step's own rollout, if groups keep to their step."""
    held_up: bool = False
    """Whether the step had to wait for a group that would have become too stale."""


class StepChoice:
    """Chooses the groups of one step, from when it is made until they are written down.

    Both of its tasks raise what `RolloutsAhead` raises.

    Args:
        ahead: has the groups.
        files: receive those of a whole rollout.
        step: its number. The step before has all of its groups.
    """

    def __init__(self, ahead: RolloutsAhead, files: AsyncJournal, step: int) -> None:
        self.step = step
        """Number of the step."""
        self._ahead = ahead
        self._files = files
        self._begun = asyncio.Event()
        self.all: asyncio.Task[ChosenStep] = asyncio.create_task(self._choose())
        """Ends with all groups."""
        self.all.add_done_callback(lambda task: self._begun.set())
        self.first: asyncio.Task[None] = asyncio.create_task(self._begin())
        """Ends when a learner can begin: with a first piece, or with all groups."""

    async def end(self) -> None:
        """Choose no more."""
        tasks = self.first, self.all
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self) -> None:
        await self._begun.wait()
        if self.all.done():
            self.all.result()

    async def _choose(self) -> ChosenStep:
        if self._ahead.groups is None:
            begun, batch = await self._ahead.rollout(self.step)
            whole = whole_rollout(begun, batch.batch, batch.versions)
            return ChosenStep(await asyncio.to_thread(self._files.take, whole), batch)
        taken, held_up = await self._ahead.take(self.step, self._begun.set)
        return ChosenStep(taken, held_up=held_up)
