"""The training loop: draw → predict → plan → generate → prepare → learn → publish → evaluate → commit."""

from rlhfless_functions import artifacts
from rlhfless_functions.api import Purpose
from rlhfless_operator.training.evaluation import evaluate
from rlhfless_operator.training.learning import EarlyLearning, learn
from rlhfless_operator.training.rollout import roll_out
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.summary import model_card_of
from rlhfless_operator.training.tasks import run_to_end


async def train(run: TrainingRun) -> None:
    """Drive a job from wherever it is to its end. Every line may be the last that this driver gets to: whoever comes
    next reads the status and the artifact store, and goes on from there.

    Raises:
        StageFailedError: a stage can't be done; the message is for the user.
        LeaseLostError: another driver has the job.
    """
    await open_data(run)
    await run.update_status(phase="Running", steps=run.total_steps, prompts=run.prompts, message="")
    if run.evaluation_due(0) and not run.records:
        await run.commit(0, None, None, await evaluate(run, 0, run.requests.initial))

    if run.status.step < run.total_steps:
        # A model that a shorter run of this job had exported is not this one's.
        artifacts.remove(run.folder.export)
    for step in range(run.status.step + 1, run.total_steps + 1):
        run.progress.begin_step(step, run.samples_per_step)
        run.enter("generation")
        async with EarlyLearning(run) as early:
            rollout = await roll_out(run, step, early.expect)
            run.enter("learning")
            learned = await learn(run, rollout, early)
        evaluation = await evaluate(run, step, learned.weights) if run.evaluation_due(step) else None
        await run.commit(step, rollout.record, learned, evaluation)

    await run.update_status(stage="export")
    await export(run)
    await run.update_status(phase="Succeeded", stage=None)


async def open_data(run: TrainingRun) -> None:
    """Have the datasets read, tokenized and published, and go to the position in them that the status names."""
    purposes: list[Purpose] = ["training"] if run.spec.evaluation is None else ["training", "evaluation"]
    for purpose in purposes:
        if not artifacts.is_published(run.folder.data(purpose)):
            run.progress.stage("data")
            await run.capacity.use("preparation", 1)
            await run_to_end(
                run.platform,
                lambda attempt, purpose=purpose: run.requests.materialize(purpose, attempt),  # type: ignore[misc]
                retries=run.spec.limits.retries,
            )
            await run.capacity.use("preparation", 0)
    run.open_position()


async def export(run: TrainingRun) -> None:
    """Publish the trained model as a Hugging Face folder with a model card."""
    run.progress.stage("export")
    weights = run.requests.weights(run.status.weights)
    await run.capacity.use("learning", 1)
    await run_to_end(
        run.platform,
        lambda attempt: run.requests.export(weights, model_card_of(run), attempt),
        retries=run.spec.limits.retries,
    )
