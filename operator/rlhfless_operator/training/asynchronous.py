"""The asynchronous training loop: the learner takes one step after the other, while the next steps' groups are made.

Generation and preparation of a step go on beside the learning of the steps before it (`rollouts_ahead.py`). Weights
that are published while a step is generated are used from the next step on, or with `newWeights: switch` from the next
token on. An evaluation's actors have the next instances that become free.
"""

import time
from asyncio import to_thread
from functools import partial
from typing import Any

from rlhfless_functions.api import LearnResult
from rlhfless_operator.job.asynchrony import AsyncSpec
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.training.affordable import check_affordable
from rlhfless_operator.training.async_journal import AsyncJournal
from rlhfless_operator.training.evaluation import evaluate
from rlhfless_operator.training.learning import Learning
from rlhfless_operator.training.rollouts_ahead import RolloutsAhead
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.step_journal import StepJournal


async def take_steps_asynchronously(run: TrainingRun, journal: StepJournal, settings: AsyncSpec) -> None:
    """Take all steps that are left.

    Raises:
        StageFailedError: a stage can't be done; the message is for the user.
        BudgetExhaustedError: the next step would take the job past its budget.
        LeaseLostError: another driver has the job.
    """
    if run.spec.evaluation and not journal.records:
        check_affordable(run, journal, 0)
        await journal.commit(0, None, None, await evaluate(run, journal, 0, run.requests.initial), run.position)
    files = AsyncJournal(run.folder)
    async with RolloutsAhead(run, journal, files, settings) as ahead:
        for step in range(journal.status.step + 1, run.prompts.total_steps + 1):
            batch, learned = await take_step(run, journal, ahead, files, step)
            evaluation = await evaluate(run, journal, step, learned.weights)
            await journal.commit(step, batch, learned, evaluation, partial(_position, run, batch))
            ahead.advance()


async def take_step(
    run: TrainingRun, journal: StepJournal, ahead: RolloutsAhead, files: AsyncJournal, step: int
) -> tuple[StepBatch, LearnResult]:
    """One update of the policy, once its rollout is there; returns how that went, and the new weights."""
    journal.enter("generation")
    began = time.monotonic()
    begun, batch = await ahead.rollout(step)
    waited = time.monotonic() - began
    taken = await to_thread(files.take, begun, batch.batch, batch.versions)
    if taken.batch != batch.batch:
        # Another driver was first, and a learner may have learnt from what it wrote.
        batch = batch.model_copy(update={"batch": taken.batch})
        journal.keep_batch(step, batch)
    journal.enter("learning")
    async with Learning(run, journal, step) as learning:
        await learning.begin(batch.batch)
        run.cost_model.measured(batch.lengths)
        run.draft_history.generated(step, batch.lengths)
        learned = await learning.result()
    metrics = {**batch.metrics, "generation/staleness": taken.staleness}
    # Only what the learner waited for held the step up.
    return batch.model_copy(update={"metrics": metrics, "seconds": {"generation": waited}}), learned


def _position(run: TrainingRun, batch: StepBatch) -> dict[str, Any]:
    """What a later driver goes on from after a step: it draws again what was drawn ahead."""
    return {**run.position(), "cursor": batch.cursor}
