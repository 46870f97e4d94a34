"""The training loop: draw → predict → plan → generate → prepare → learn → publish → evaluate → commit."""

import asyncio
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.api import LearnResult
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.asynchronous.loop import take_steps_asynchronously
from rlhfless_operator.training.journal.garbage import remove_leftovers
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.affordable import check_affordable
from rlhfless_operator.training.stages.changed_inputs import open_inputs
from rlhfless_operator.training.stages.changed_settings import open_settings
from rlhfless_operator.training.stages.datasets import data_status, open_data
from rlhfless_operator.training.stages.evaluation import evaluate
from rlhfless_operator.training.stages.export import export
from rlhfless_operator.training.stages.idling import note_idling
from rlhfless_operator.training.stages.learner_choice import choose_learners
from rlhfless_operator.training.stages.learning import Learning
from rlhfless_operator.training.stages.letting_go import LettingGo
from rlhfless_operator.training.stages.look_ahead import look_ahead
from rlhfless_operator.training.stages.mismatch import check_mismatch
from rlhfless_operator.training.stages.rollout import RolloutTask, roll_out
from rlhfless_operator.training.stages.rollout_record import record_rollout
from rlhfless_operator.training.stages.state_saving import StateSaving


async def train(run: TrainingRun, journal: StepJournal) -> None:
    """Drive a job to its end from its newest status.

    The driver may end after any line. The next one reads the status and the artifact store, and continues from there.

    Raises:
        StageFailedError: a stage can't be done; the message is for the user.
        BudgetExhaustedError: the next step would take the job past its budget.
        LeaseLostError: another driver has the job.
    """
    await asyncio.to_thread(open_inputs, run, journal)
    await open_data(run, journal)
    await asyncio.to_thread(open_settings, run, journal)
    data: dict[str, Any] = {"data": data_status(run, "training"), "evaluation_data": data_status(run, "evaluation")}
    data |= _length(run, journal)
    await journal.update_status(phase="Running", prompts=run.prompts.count, message="", **data)
    if journal.status.step < run.prompts.total_steps:
        # A shorter run of this job may have exported a model that is not this one's.
        await asyncio.to_thread(journal.lease.fenced, artifacts.remove, run.folder.export)

    if run.spec.asynchronous is None:
        await take_steps(run, journal)
    else:
        await take_steps_asynchronously(run, journal, run.spec.asynchronous)

    # First the number of steps: until then a budget would be kept for a step that does not come.
    await journal.update_status(stage="export", **_length(run, journal))
    for stage in ("generation", "preparation"):
        await run.capacity.finish(stage)
    await export(run, journal)
    await asyncio.to_thread(journal.lease.fenced, remove_leftovers, run.folder)
    await journal.update_status(phase="Succeeded", stage=None)


def _length(run: TrainingRun, journal: StepJournal) -> dict[str, Any]:
    """Return the status fields that depend on the number of steps, which dynamic sampling may lower."""
    steps = {"steps": run.prompts.total_steps}
    return {**steps, **journal.outlook(journal.status.model_copy(update=steps))}


async def take_steps(run: TrainingRun, journal: StepJournal) -> None:
    """Take all steps that are left, each once the one before is done."""
    # Step 0 is the evaluation of the model as given.
    is_new = journal.status.step == 0 and not journal.records
    step = 0 if run.spec.evaluation and is_new else journal.status.step + 1
    async with StateSaving(run, journal) as saving, LettingGo(run, saving, journal.status.step) as letting_go:
        while step <= run.prompts.total_steps:
            check_affordable(run, journal, step)
            rollout, learned = await take_step(run, journal, step, saving, letting_go) if step > 0 else (None, None)
            letting_go.learnt(step)
            weights = learned.weights if learned else run.requests.initial
            evaluation = await evaluate(run, journal, step, weights, letting_go.consider)
            note_idling(run, journal, step)
            await journal.commit(step, rollout, learned, evaluation, run.position)
            saving.written_down()
            step += 1
        # Too few prompts may have been left for another step.
        await saving.checkpoint_written()


async def take_step(
    run: TrainingRun, journal: StepJournal, step: int, saving: StateSaving, letting_go: LettingGo
) -> tuple[StepBatch, LearnResult]:
    """Update the policy once; return the rollout's record and the new weights."""
    run.progress.begin_step(step, run.spec.batch.prompts_per_step * run.spec.batch.samples_per_prompt)
    journal.enter("generation")
    await choose_learners(run, journal, step)
    policy = run.requests.weights(journal.status.weights)
    policies = SamplingWeights(policy)
    async with Learning(run, journal, step, saving) as learning:

        def on_forecast(left: float) -> bool:
            return letting_go.consider(learning.has_work_in(left)) or learning.starts_by_itself(left)

        task = RolloutTask(step, "training", policies, journal.status.critic, on_forecast=on_forecast)
        rollout = await roll_out(run, task, learning.expect)
        journal.enter("learning")
        await learning.begin(rollout.batch)
        # While the learner works there is time to record the rollout, to learn from it, and to plan.
        if not isinstance(rollout, StepBatch):
            rollout = record_rollout(run, rollout)
            journal.keep_batch(step, rollout)
        run.cost_model.measured(rollout.lengths, run.prompts.tokens("training"))
        run.draft_history.generated(step, rollout.lengths)
        await look_ahead(run, journal, step, rollout.lengths, learning.learnt_seconds)
        learned = await learning.result()
        check_mismatch(run.spec, step, {**rollout.metrics, **learned.metrics})
        return rollout, learned
