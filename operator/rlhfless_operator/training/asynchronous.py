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
from rlhfless_operator.training.async_journal import AsyncJournal, TakenStep, whole_rollout
from rlhfless_operator.training.evaluation import evaluate
from rlhfless_operator.training.free_groups import FreeGroups
from rlhfless_operator.training.learning import Learning
from rlhfless_operator.training.rollout_record import groups_metrics
from rlhfless_operator.training.rollouts_ahead import RolloutsAhead
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.samples import kept_examples
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
            await journal.commit(step, batch, learned, evaluation, partial(_position, run, ahead, batch))
            ahead.advance()
        await ahead.finish()


async def take_step(
    run: TrainingRun, journal: StepJournal, ahead: RolloutsAhead, files: AsyncJournal, step: int
) -> tuple[StepBatch, LearnResult]:
    """One update of the policy, once its rollout is there; returns how that went, and the new weights."""
    journal.enter("generation")
    began = time.monotonic()
    if ahead.groups is None:
        begun, batch = await ahead.rollout(step)
        taken = await to_thread(files.take, whole_rollout(begun, batch.batch, batch.versions))
        held_up = False
    else:
        taken, held_up = await ahead.take(step)
    waited = time.monotonic() - began
    # Another driver may have been first, and a learner may have learnt from what it wrote.
    journal.learns_from(taken.batch)
    journal.enter("learning")
    async with Learning(run, journal, step) as learning:
        await learning.begin(taken.batch)
        if ahead.groups is None:
            run.cost_model.measured(batch.lengths)
            run.draft_history.generated(step, batch.lengths)
        learned = await learning.result()
    if ahead.groups is not None:
        batch = step_of_groups(run, ahead, ahead.groups, taken, held_up=held_up)
    metrics = {**batch.metrics, "generation/staleness": taken.staleness}
    # Only what the learner waited for held the step up.
    changes = {"batch": taken.batch, "metrics": metrics, "seconds": {"generation": waited}}
    return batch.model_copy(update=changes), learned


def step_of_groups(
    run: TrainingRun, ahead: RolloutsAhead, groups: FreeGroups, taken: TakenStep, *, held_up: bool
) -> StepBatch:
    """What is told of a step that learnt from groups of any rollouts: how these were, and how generation went since."""
    found = groups.learnt(taken)
    plan, metrics = ahead.report()
    assert plan is not None, "a group is complete, so a rollout was planned"
    switches = run.spec.asynchronous is not None and run.spec.asynchronous.new_weights == "switch"
    metrics = {
        # Only groups that keep to their step are sampled in several rounds.
        "dynamic_sampling/rounds": 1.0,
        "dynamic_sampling/replaced_groups": 0.0,
        **metrics,
        "preparation/instances": float(plan.preparers),
        **groups_metrics([each.result for each in found], taken.step, switches=switches),
        "generation/waits": float(held_up),
        "generation/dropped_groups": float(groups.count_dropped()),
        "generation/downweighted_groups": float(sum(group.factor != 1 for group in taken.groups)),
    }
    if switches:
        responses = sum(each.result.switched_responses for each in found)
        metrics["generation/switched_responses"] = responses / len(taken.batch.samples)
    examples = [example for each in found for example in each.examples]
    return StepBatch(
        batch=taken.batch,
        cursor={},
        lengths={},
        metrics=metrics,
        plan=plan,
        seconds={},
        samples=kept_examples(examples, taken.batch.samples, run.spec.tracking.sample_groups),
    )


def _position(run: TrainingRun, ahead: RolloutsAhead, batch: StepBatch) -> dict[str, Any]:
    """What a later driver goes on from after a step: it draws again what was drawn ahead and is not written down."""
    return {**run.position(), "cursor": batch.cursor, **ahead.position(batch.batch.step)}
