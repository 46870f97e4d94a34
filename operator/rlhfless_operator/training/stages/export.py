"""The end of a job: the export of the trained model."""

from functools import partial

from rlhfless_operator.report import model_card
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.journal.summary import summarize
from rlhfless_operator.training.requests.tasks import run_to_end
from rlhfless_operator.training.run import TrainingRun


async def export(run: TrainingRun, journal: StepJournal) -> None:
    """Publish the newest weights as a Hugging Face folder with a model card.

    Raises:
        StageFailedError: the model can't be exported.
    """
    run.progress.stage("export")
    weights = run.requests.weights(journal.status.weights)
    summary = summarize(run.job, journal.status, journal.records)
    prompting = run.requests.prompting(chat=run.prompts.counts("training").chats > 0)
    card = model_card(run.job, summary, prompting)
    request = partial(run.requests.export, weights, card, prompting, run.folder.export)
    await run.capacity.use("learning", 1)
    await run_to_end(run.platform, request, retries=run.spec.limits.retries)
