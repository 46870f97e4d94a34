"""The learning stage: one request, from a batch to the next weights version."""

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, LearnResult
from rlhfless_operator.training.journal import StepBatch
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.tasks import run_to_end


async def learn(run: TrainingRun, batch: BatchReference) -> LearnResult:
    """Take the step. A learner that lost its memory replays the batches since the newest checkpoint.

    Raises:
        StageFailedError: the step can't be taken, for a loss that is not finite for one.
    """
    run.progress.stage("learning")
    await run.platform.hold("learning", 1)
    checkpoint_step = run.status.checkpoint.step if run.status.checkpoint else 0
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
    )
    return LearnResult.model_validate(result)


def _batch_of(run: TrainingRun, step: int) -> BatchReference:
    return StepBatch.model_validate(artifacts.read_json(run.folder.result("batch", step))).batch
