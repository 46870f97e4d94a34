"""The datasets of a job, made ready for its steps."""

import asyncio
from collections.abc import Sequence
from functools import partial

from rlhfless_functions import artifacts
from rlhfless_functions.api import Purpose
from rlhfless_operator.records.status import DataStatus
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.requests.tasks import run_to_end
from rlhfless_operator.training.run import TrainingRun


async def open_data(run: TrainingRun, journal: StepJournal) -> None:
    """Have the datasets read, tokenized and published, and go to the position in the status.

    Raises:
        StageFailedError: a dataset can't be used.
        ValueError: the training data has too few prompts for a step.
    """
    purposes: list[Purpose] = ["training"] if run.spec.evaluation is None else ["training", "evaluation"]
    for purpose in purposes:
        if not await asyncio.to_thread(artifacts.is_published, run.folder.data(purpose)):
            run.progress.stage("data")
            await run.capacity.use("preparation", 1)
            request = partial(run.requests.materialize, purpose)
            await run_to_end(run.platform, request, retries=run.spec.limits.retries)
            await run.capacity.use("preparation", 0)
    await asyncio.to_thread(_open_all, run, journal, purposes)


def _open_all(run: TrainingRun, journal: StepJournal, purposes: Sequence[Purpose]) -> None:
    """Read the datasets, and what earlier drivers have done. Blocks."""
    try:
        run.prompts.open_training()
    except ValueError:
        if not journal.status.step:
            # The user will mend the dataset, and then it must be read again.
            run.lease.fenced(_forget_data, run)
        raise
    for purpose in purposes:
        _tell(run, purpose)
    if journal.status.step:
        run.restore(artifacts.read_json(run.folder.progress(journal.status.step)))
        run.prompts.settle(journal.status.step)
    journal.read_records()


def _forget_data(run: TrainingRun) -> None:
    artifacts.remove(run.requests.materialize("training", 0).result)
    artifacts.remove(run.folder.data("training"))


def data_status(run: TrainingRun, purpose: Purpose) -> DataStatus | None:
    """Return the job's status of an opened dataset; None if there is none."""
    if purpose == "evaluation" and run.spec.evaluation is None:
        return None
    counts = run.prompts.counts(purpose)
    numbers = counts.model_dump(include=set(DataStatus.model_fields))
    return DataStatus(prompts=counts.rows - counts.left_out, **numbers)


def _tell(run: TrainingRun, purpose: Purpose) -> None:
    """Report how many rows of a dataset were left out, and what it lacks."""
    if purpose == "evaluation":
        run.prompts.open(purpose)
    counts = run.prompts.counts(purpose)
    name = "data" if purpose == "training" else "evaluation.data"
    if counts.left_out:
        kept = counts.rows - counts.left_out
        run.progress.note(
            f"{name}: {kept} prompts of {counts.rows} rows; {counts.left_out} were left out: {counts.reasons}"
        )
    for note in counts.notes:
        run.progress.note(f"{name}: {note}")
    if counts.without_ground_truth:
        first = counts.first["without_ground_truth"]
        run.progress.note(f"{name}: {counts.without_ground_truth} prompts have no ground truth (first {first})")
