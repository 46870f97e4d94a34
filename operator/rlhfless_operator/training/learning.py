"""The learning stage: one request, from a batch to the next weights version."""

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, Event, LearnResult
from rlhfless_operator.training.journal import StepBatch
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.tasks import run_to_end


async def learn(run: TrainingRun, batch: BatchReference) -> LearnResult:
    """Take the step. A learner that lost its memory replays the batches since the newest checkpoint.

    Raises:
        StageFailedError: the step can't be taken, for a loss that is not finite for one.
    """
    run.progress.stage("learning")
    await run.holding.use("learning", 1, run.learner_preload)
    checkpoint_step = run.status.checkpoint.step if run.status.checkpoint else 0
    looked_ahead = False

    def look_ahead(event: Event) -> None:
        # While the learner works there is time to plan.
        nonlocal looked_ahead
        if not looked_ahead:
            looked_ahead = True
            run.look_ahead(batch.step)

    replay = [_batch_of(run, step) for step in range(checkpoint_step + 1, batch.step)]
    result = await run_to_end(
        run.platform,
        lambda attempt: run.requests.learn(
            run.status,
            batch,
            replay,
            run.total_steps,
            checkpoint_due=run.checkpoint_due(batch.step),
            attempt=attempt,
        ),
        retries=run.spec.limits.retries,
        on_event=look_ahead,
    )
    learned = LearnResult.model_validate(result)
    # Unless it is kept, its successor takes the steps since the newest checkpoint again.
    again = 0 if learned.checkpoint is not None else batch.step - checkpoint_step
    run.experience.learned(learned)
    await run.holding.use("learning", 0, restart_seconds=run.experience.restart_seconds(again))
    return learned


def _batch_of(run: TrainingRun, step: int) -> BatchReference:
    return StepBatch.model_validate(artifacts.read_json(run.folder.result("batch", step))).batch
