"""`rlhfless export`: make a Hugging Face folder of a run's newest weights, whether it ended or was stopped."""

import os
import tempfile
from functools import partial

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.lone_learner import lone_learner
from rlhfless_operator.platforms.base import Platform
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.report import model_card
from rlhfless_operator.training.data.prompts import Prompts
from rlhfless_operator.training.journal.begun_job import begun_job
from rlhfless_operator.training.journal.step_journal import committed_records, new_uid, read_status
from rlhfless_operator.training.journal.summary import summarize
from rlhfless_operator.training.requests.builder import RequestBuilder
from rlhfless_operator.training.requests.tasks import StageFailedError, run_to_end


async def export_locally(root: str, destination: str) -> RLHFJobStatus:
    """Publish the newest weights of a run that no driver needs to finish. Nothing in the run's folder changes.

    Args:
        root: URI of the run's folder.
        destination: URI of the folder for the model; it must be empty, or not exist.

    Returns:
        The status whose weights these are.

    Raises:
        UserError: there is no run there, it has published no weights, or the destination is in use.
        StageFailedError: the model can't be exported.
    """
    folder = JobFolder(root)
    job, status = begun_job(folder), read_status(folder)
    if job is None or status is None:
        raise UserError(f"{root} is no run's folder; name one, such as runs/quickstart")
    _check(job, status, root)
    if artifacts.list_files(destination):
        raise UserError(f"{destination} has files already: name a folder that is empty or does not exist")
    platform = lone_learner(job, folder, len(os.sched_getaffinity(0)), "export")
    try:
        with tempfile.TemporaryDirectory(prefix="rlhfless-export-") as scratch:
            await _export(
                job, folder, status, destination, RequestBuilder(job, JobFolder(scratch), new_uid()), platform
            )
    except StageFailedError as error:
        later = read_status(folder)
        if later is None or later.step == status.step:
            raise
        raise UserError(
            f"the run goes on, and the weights of step {status.step} may be removed already: export again, or stop it"
            f" first ({error})"
        ) from error
    finally:
        await platform.close()
    return status


def _check(job: RLHFJob, status: RLHFJobStatus, root: str) -> None:
    """Check that there are weights to export.

    Raises:
        UserError: there are none.
    """
    if job.spec.rehearsal is not None:
        raise UserError(f"{root} is a rehearsal, which trains no model")
    weights = status.weights
    if weights is None or not status.step:
        raise UserError(f"{root} has no finished step, so there are no weights to export: let the run go on")
    place = weights.adapter or weights.uri
    if not artifacts.is_published(place):
        where = (
            "" if place.startswith("/") or "://" in place else "; export from the folder in which the run was started"
        )
        raise UserError(f"the weights of step {weights.version} are not at {place}{where}")


async def _export(
    job: RLHFJob,
    folder: JobFolder,
    status: RLHFJobStatus,
    destination: str,
    requests: RequestBuilder,
    platform: Platform,
) -> None:
    assert status.weights is not None
    prompts = Prompts(job.spec, folder)
    prompts.open("training")
    prompting = requests.prompting(chat=prompts.counts("training").chats > 0)
    summary = {**summarize(job, status, committed_records(folder, status)), "total_steps": status.steps}
    card = model_card(job, summary, prompting)
    await platform.hold("learning", 1)
    request = partial(requests.export, status.weights, card, prompting, destination)
    await run_to_end(platform, request, retries=job.spec.limits.retries)
