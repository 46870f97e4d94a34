"""Rollouts that are made ahead of the learner, one step's after the other's, as far as staleness allows."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.training.affordable import check_affordable
from rlhfless_operator.training.async_journal import AsyncJournal, BegunRollout
from rlhfless_operator.training.rollout import RolloutTask, roll_out
from rlhfless_operator.training.rollout_record import record_rollout
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.staleness import oldest_version
from rlhfless_operator.training.step_journal import StepJournal


class RolloutsAhead:
    """Generates and prepares in the background, from when it is entered until it is left.

    What is ready waits in the store. What goes wrong is raised when the learner asks for that step, so that the steps
    before are still learnt.

    Args:
        run: the job in hand.
        journal: its status says how far the learner is.
        files: where it is written which weights sample what.
        max_staleness: most versions between the weights that sample a step's groups and those that it starts from.
    """

    def __init__(self, run: TrainingRun, journal: StepJournal, files: AsyncJournal, max_staleness: int) -> None:
        self._run = run
        self._journal = journal
        self._files = files
        self._max_staleness = max_staleness
        self._rollouts: dict[int, asyncio.Future[tuple[BegunRollout, StepBatch]]] = {}
        self._advanced = asyncio.Event()
        self._stages = asyncio.Lock()
        self._making: asyncio.Task[None] | None = None

    async def rollout(self, step: int) -> tuple[BegunRollout, StepBatch]:
        """A step's rollout once it is complete, and what it was made with; each is asked for once.

        Raises:
            StageFailedError: generation or preparation can't be done.
            UnscorableError: too few of the samples have a reward.
            BudgetExhaustedError: the step would take the job past its budget.
        """
        try:
            return await self._of(step)
        finally:
            del self._rollouts[step]

    def advance(self) -> None:
        """A step is done: its weights may sample, and a later step may begin."""
        self._advanced.set()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Once the rollout under way is complete no other begins, and its stages are free, until this is left."""
        async with self._stages:
            yield

    async def __aenter__(self) -> Self:
        self._making = asyncio.create_task(self._make_all(self._journal.status.step + 1))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._making is not None
        self._making.cancel()
        await asyncio.gather(self._making, *self._rollouts.values(), return_exceptions=True)

    async def _make_all(self, first: int) -> None:
        step = first
        try:
            for step in range(first, self._run.prompts.total_steps + 1):
                made = await self._make(step)
                self._of(step).set_result(made)
        except asyncio.CancelledError:
            self._of(step).cancel()
            raise
        except Exception as error:
            self._of(step).set_exception(error)

    async def _make(self, step: int) -> tuple[BegunRollout, StepBatch]:
        run, journal = self._run, self._journal
        while journal.status.step < self._done_before(step):
            self._advanced.clear()
            await self._advanced.wait()
        async with self._stages:
            # A version that is not written down would be made anew by the next driver.
            await journal.written()
            check_affordable(run, journal, step)
            policy, critic = run.requests.newest(journal.published)
            begun = BegunRollout(step=step, policy=policy, critic=critic)
            begun = await asyncio.to_thread(self._files.begin, begun)
            run.progress.begin_step(step, run.spec.batch.prompts_per_step * run.spec.batch.samples_per_prompt)
            task = RolloutTask(step, "training", begun.policy, begun.critic)
            rollout = await roll_out(run, task, lambda batch, plan, pieces: None)
            if isinstance(rollout, StepBatch):
                return begun, rollout
            batch = record_rollout(run, rollout)
            journal.keep_batch(step, batch)
            return begun, batch

    def _done_before(self, step: int) -> int:
        """The last step that has to be done when a step's generation begins."""
        oldest, journal = oldest_version(step, self._max_staleness), self._journal
        # What steps take is known once one of them is done.
        unknown = journal.budget() is not None and not any(record.step for record in journal.records)
        return max(oldest, step - 1) if unknown else oldest

    def _of(self, step: int) -> asyncio.Future[tuple[BegunRollout, StepBatch]]:
        return self._rollouts.setdefault(step, asyncio.get_running_loop().create_future())
