"""Rollouts that are made ahead of the learner, as far as staleness allows.

The next one begins as soon as an actor of those under way has nothing left, and takes over its instance: the longest
responses of a step go on beside the first ones of the next.
"""

import asyncio
from types import TracebackType
from typing import Self

from rlhfless_operator.job.asynchrony import AsyncSpec
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.training.affordable import check_affordable
from rlhfless_operator.training.async_journal import AsyncJournal, BegunRollout
from rlhfless_operator.training.rollout import RolloutTask, roll_out
from rlhfless_operator.training.rollout_record import record_rollout, with_versions
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.sampling_weights import SamplingWeights
from rlhfless_operator.training.staleness import last_step_begun, steps_ahead
from rlhfless_operator.training.step_journal import StepJournal

_ROLLOUT = "rollout"
"""Under which name the history has what rollouts took."""
_Made = tuple[BegunRollout, StepBatch]


class RolloutsAhead:
    """Generates and prepares in the background, from when it is entered until it is left.

    Finished rollouts wait in the store. A failure is raised when the learner asks for that step; the steps before are
    still learnt.

    Args:
        run: the job in hand.
        journal: its status says how far the learner is.
        files: where it is written which weights sample what.
        settings: how far ahead, and with which weights.
    """

    def __init__(self, run: TrainingRun, journal: StepJournal, files: AsyncJournal, settings: AsyncSpec) -> None:
        self._run = run
        self._journal = journal
        self._files = files
        self._settings = settings
        self._rollouts: dict[int, asyncio.Task[_Made]] = {}
        """By step, those that the learner has not taken."""
        self._last = journal.status.step
        """The last step whose rollout may begin."""

    async def rollout(self, step: int) -> _Made:
        """A step's rollout once it is complete, and what it was made with; each is asked for once.

        Raises:
            StageFailedError: generation or preparation can't be done.
            UnscorableError: too few of the samples have a reward.
            BudgetExhaustedError: the step would take the job past its budget.
        """
        try:
            return await self._rollouts[step]
        finally:
            del self._rollouts[step]

    def advance(self) -> None:
        """A step is done, or the first is to be taken: more rollouts may begin, as far as staleness allows."""
        last = min(self._last_admitted(), self._run.prompts.total_steps)
        for step in range(self._last + 1, last + 1):
            earlier = self._rollouts.get(step - 1)
            self._rollouts[step] = asyncio.create_task(self._make(step, earlier))
            self._last = step

    async def __aenter__(self) -> Self:
        self.advance()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for rollout in self._rollouts.values():
            rollout.cancel()
        await asyncio.gather(*self._rollouts.values(), return_exceptions=True)

    def _last_admitted(self) -> int:
        """The last step whose rollout may begin."""
        journal, history = self._journal, self._run.cost_model.history
        # What steps take is known once one of them is done.
        unknown = journal.budget() is not None and not any(record.step for record in journal.records)
        ahead = steps_ahead(self._settings.max_staleness, history.mean(_ROLLOUT), history.mean("learning"))
        return last_step_begun(journal.status.step, 0 if unknown else ahead)

    async def _make(self, step: int, earlier: asyncio.Task[_Made] | None) -> _Made:
        try:
            if earlier is not None:
                await self._wait_for_room(step, earlier)
            return await self._roll_out(step)
        finally:
            await self._run.generators.release(step)

    async def _wait_for_room(self, step: int, earlier: asyncio.Task[_Made]) -> None:
        """Wait until the rollout of the step before has no use for one of its instances."""
        if self._run.requests.algorithm.dynamic_sampling_rounds:
            # It may yet draw the prompts that come next.
            await earlier
            return
        room = asyncio.create_task(self._run.generators.room_for(step, beside=step - 1))
        try:
            await asyncio.wait({room, earlier}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            room.cancel()
        if earlier.done():
            # Where it has failed, this one never begins.
            earlier.result()

    async def _roll_out(self, step: int) -> _Made:
        run, journal = self._run, self._journal
        # A version that is not written down would be made anew by the next driver.
        await journal.written()
        check_affordable(run, journal, step)
        policy, critic = run.requests.newest(journal.published)
        begun = BegunRollout(step=step, policy=policy, critic=critic)
        begun = await asyncio.to_thread(self._files.begin, begun)
        beside = any(not rollout.done() for other, rollout in self._rollouts.items() if other < step)
        run.progress.begin_step(
            step, run.spec.batch.prompts_per_step * run.spec.batch.samples_per_prompt, beside=beside
        )
        task = RolloutTask(step, "training", self._weights(begun), begun.critic)
        rollout = await roll_out(run, task, lambda batch, plan, pieces: None)
        if isinstance(rollout, StepBatch):
            return begun, rollout
        run.cost_model.history.add(_ROLLOUT, sum(rollout.seconds.values()))
        batch = record_rollout(run, rollout)
        if self._settings.new_weights == "switch":
            batch = with_versions(batch, rollout)
        journal.keep_batch(step, batch)
        return begun, batch

    def _weights(self, begun: BegunRollout) -> SamplingWeights:
        """What the requests of a rollout sample with."""
        # What the step makes is made of all of its groups.
        last = begun.step - 1
        if self._settings.new_weights == "finish":
            return SamplingWeights(begun.policy, last_version=last)
        # A version that is not written down would be made anew by the next driver.
        return SamplingWeights(begun.policy, lambda: self._run.requests.newest(self._journal.published)[0], last)
