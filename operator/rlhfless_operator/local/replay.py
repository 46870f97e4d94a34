"""`rlhfless replay`: take a run's steps again on this machine, and compare the weights."""

import os

from rlhfless_operator.errors import UserError
from rlhfless_operator.local.lone_learner import lone_learner
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.journal.begun_job import begun_job
from rlhfless_operator.training.journal.step_journal import committed_records, read_status
from rlhfless_operator.training.replaying import Replay, replay

_THREADS = "learning/threads"
"""Metric with the number of CPU threads that a step was learnt with."""


async def replay_locally(root: str, threads: int | None = None, *, keep: bool = False) -> Replay:
    """Take the finished steps of a run again.

    Args:
        root: URI of the run's folder.
        threads: CPU threads of the learner; the last bits depend on them. As many as the run's learner had if left out.
        keep: whether the replay's weights stay, in the folder `replay` of the run.

    Raises:
        UserError: there is no run there, or it can't be taken again.
    """
    folder = JobFolder(root)
    job, status = begun_job(folder), read_status(folder)
    if job is None or status is None:
        raise UserError(f"{root} is no run's folder; name one, such as runs/quickstart")
    platform = lone_learner(job, folder, threads or _threads_of_run(folder, status), "replay")
    try:
        return await replay(job, folder, status, platform, keep=keep)
    finally:
        await platform.close()


def _threads_of_run(folder: JobFolder, status: RLHFJobStatus) -> int:
    """Return the CPU threads that the run's learner had; all cores if no step says.

    Raises:
        UserError: it had different numbers of them.
    """
    records = committed_records(folder, status)
    found = sorted({int(record.metrics[_THREADS]) for record in records if _THREADS in record.metrics})
    if len(found) > 1:
        numbers = " and ".join(map(str, found))
        raise UserError(
            f"the steps of {folder.root} were learnt with {numbers} threads, and a replay learns all with one number:"
            " name it with --threads. The weights may differ in their last bits"
        )
    return found[0] if found else len(os.sched_getaffinity(0))


def verdict(found: Replay) -> str:
    """Describe the result of a replay."""
    if not found.differing:
        return f"{found.steps} steps taken again: the same weights bit for bit, in all {found.files} files"
    return (
        f"{found.steps} steps taken again: {len(found.differing)} of {found.files} files differ"
        f" ({', '.join(found.differing)}). Bits depend on the number of threads (--threads) and of learning processes,"
        " and on the machine; on GPUs they differ. --keep keeps the replay's weights"
    )
