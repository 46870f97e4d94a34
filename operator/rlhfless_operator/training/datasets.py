"""The datasets of a job, made ready for its steps."""

from functools import partial

from rlhfless_functions import artifacts
from rlhfless_functions.api import Purpose
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.step_journal import StepJournal
from rlhfless_operator.training.tasks import run_to_end


async def open_data(run: TrainingRun, journal: StepJournal) -> None:
    """Have the datasets read, tokenized and published, and go to where the status says that the job is.

    Raises:
        StageFailedError: a dataset can't be used.
        ValueError: the training data has too few prompts for a step.
    """
    purposes: list[Purpose] = ["training"] if run.spec.evaluation is None else ["training", "evaluation"]
    for purpose in purposes:
        if not artifacts.is_published(run.folder.data(purpose)):
            run.progress.stage("data")
            await run.capacity.use("preparation", 1)
            request = partial(run.requests.materialize, purpose)
            await run_to_end(run.platform, request, retries=run.spec.limits.retries)
            await run.capacity.use("preparation", 0)
    run.prompts.open_training()
    if journal.status.step:
        run.restore(artifacts.read_json(run.folder.progress(journal.status.step)))
    journal.read_records()
