"""The replay of a run: learn its steps again from what it kept, and compare the weights."""

from dataclasses import dataclass
from functools import partial

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, LearnRequest, LearnResult, Preload, WeightsReference
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.base import Platform
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.records.settings_history import read_settings_history
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.journal.async_journal import read_taken
from rlhfless_operator.training.journal.step_journal import new_uid
from rlhfless_operator.training.requests.builder import RequestBuilder
from rlhfless_operator.training.requests.tasks import run_to_end


class NotReplayableError(UserError):
    """The run's steps can't be taken again."""


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    steps: int
    """Number of steps."""
    files: int
    """Number of files of the weights, and of the critic if there is one."""
    differing: list[str]
    """Names of the files that are not the same bit for bit."""


async def replay(
    job: RLHFJob, folder: JobFolder, status: RLHFJobStatus, platform: Platform, *, keep: bool = False
) -> Replay:
    """Learn all finished steps again, from the model as given, in the order that the run wrote down.

    Args:
        job: the document that the run was last driven with.
        folder: of the run.
        status: as its last driver left it.
        platform: provides a learner.
        keep: whether the replay's weights stay, in the folder `replay` of the run.

    Raises:
        NotReplayableError: the run has not kept what its steps learnt from.
        StageFailedError: a step can't be taken.
    """
    if job.spec.learning.instances.max > 1:
        raise NotReplayableError(
            "learning.instances.max is above 1: how many instances took a step decides on its last bits, so there is"
            " nothing to compare with"
        )
    batches = [kept_batch(folder, step) for step in range(1, status.step + 1)]
    if not batches or status.weights is None:
        raise NotReplayableError(f"{folder.root} has no finished step yet: let the run go on")
    again = JobFolder(folder.replay)
    artifacts.remove(again.root)
    try:
        requests = RequestBuilder(job, again, new_uid())
        await platform.hold("learning", 1, Preload(model=job.spec.model, weights=requests.initial))
        request = partial(_request, requests, folder, status, batches)
        result = await run_to_end(platform, request, retries=job.spec.limits.retries)
        learned = LearnResult.model_validate(result)
        pairs = [(status.weights, learned.weights), (status.critic, learned.critic)]
        compared = [same for first, second in pairs if first and second for same in _compared(first, second)]
        return Replay(status.step, len(compared), [name for name, same in compared if not same])
    finally:
        if not keep:
            artifacts.remove(again.root)


def kept_batch(folder: JobFolder, step: int) -> BatchReference:
    """Return the batch that a step of a run learnt from, in the order of learning.

    Raises:
        NotReplayableError: it is not there any more.
    """
    taken, recorded = read_taken(folder, step), folder.result("batch", step)
    if taken is not None:
        batch = taken.batch
    elif artifacts.exists(recorded):
        batch = StepBatch.model_validate(artifacts.read_json(recorded)).batch
    else:
        raise _not_kept(folder, step)
    missing = next((part for part in batch.parts if not artifacts.exists(part)), None)
    if missing is None:
        return batch
    if not missing.startswith("/") and "://" not in missing:
        raise NotReplayableError(
            f"{missing} is not there. The run's records name files relative to the folder that it was started in:"
            " replay it from that folder. If this is that folder, the run has not kept what step"
            f" {step} learnt from, for which it needs checkpoints.keepRollouts: true from the first step on"
        )
    raise _not_kept(folder, step)


def _not_kept(folder: JobFolder, step: int) -> NotReplayableError:
    return NotReplayableError(
        f"{folder.root} has not kept what step {step} learnt from: replay needs checkpoints.keepRollouts: true from the"
        " first step on"
    )


def _request(
    requests: RequestBuilder, folder: JobFolder, status: RLHFJobStatus, batches: list[BatchReference], attempt: int
) -> LearnRequest:
    *earlier, last = batches
    # The learner starts from the model as given, and repeats the steps.
    base = WeightsReference(version=last.step - 1, uri=folder.weights(last.step - 1)) if earlier else None
    begin = status.model_copy(update={"weights": base, "checkpoint": None})
    history = read_settings_history(folder)
    # A job that used up its epochs early has fewer steps than its schedule.
    taken_with = history.of(last.step)
    total_steps = status.steps if taken_with is None else taken_with.total_steps
    return requests.learn(begin, last, earlier, history, total_steps, checkpoint_due=False, attempt=attempt)


def _compared(first: WeightsReference, second: WeightsReference) -> list[tuple[str, bool]]:
    """Compare the files of two versions. Return each with whether it is the same in both."""
    found = [artifacts.manifest(each.adapter or each.uri) for each in (first, second)]
    files, again = ({} if each is None else each.files for each in found)
    return [
        (name, name in files and name in again and files[name].checksum == again[name].checksum)
        for name in sorted({*files, *again})
    ]
