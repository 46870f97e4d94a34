"""One driver from start to end: it takes the lease, opens the run, trains, and leaves a true status behind."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.settings.base import format_duration
from rlhfless_operator.errors import StoreUnavailableError, UserError
from rlhfless_operator.job.generated.change_rules import FIXED_FIELDS
from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.base import Platform, StateChange
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.input_digests import changed, read_digests
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.records.status import Phase, RLHFJobStatus
from rlhfless_operator.training.costs.starting_point import starting_latency
from rlhfless_operator.training.journal.begun_job import begun_job, changes_between, changes_since, write_begun_job
from rlhfless_operator.training.journal.budget import BudgetExhaustedError, check_spent
from rlhfless_operator.training.journal.garbage import remove_remains
from rlhfless_operator.training.journal.inputs import described, is_fixed, take_digests
from rlhfless_operator.training.journal.lease import LEASE_SECONDS, RENEW_SECONDS, Lease, LeaseLostError, take_lease
from rlhfless_operator.training.journal.run_folder import claim_folder
from rlhfless_operator.training.journal.step_journal import StepJournal, committed_records, new_uid, read_status
from rlhfless_operator.training.journal.summary import summarize
from rlhfless_operator.training.journal.tracking import Tracking, check_tracking, open_tracking
from rlhfless_operator.training.loop import train
from rlhfless_operator.training.run import AvailableGpus, TrainingRun, open_run

_BEFORE_THE_FIRST_STEP = (
    *("data", "rollouts", "batches", "results", "weights", "critics", "checkpoints", "states"),
    *("traces", "journal", "metrics.jsonl", "samples.jsonl"),
)
"""Folders and files that may have been made before a first step is done."""
_BUDGET_SECONDS = 0.5
"""Seconds between two looks at the money that the step under way has spent."""
_RELEASE_SECONDS = 30.0
"""Longest seconds from letting an instance go until it is told to end."""


class JobChangedError(UserError):
    """The document differs from the one that the job was begun with.

    Args:
        fields: the parts that changed.
        root: URI of the job's folder.
    """

    def __init__(self, fields: str, root: str) -> None:
        super().__init__(
            f"{fields} changed since this job was begun in {root};"
            f" undo the change, use another metadata.name, or start over with --fresh"
        )
        self.fields = fields


class DeadlineExceededError(UserError):
    """The job has taken longer than it may."""


async def drive(
    job: RLHFJob,
    folder: JobFolder,
    make_platform: Callable[[Callable[[StateChange], None]], Platform],
    progress: LiveProgress,
    gpus: AvailableGpus,
    *,
    on_open: Callable[[TrainingRun, StepJournal], None] = lambda run, journal: None,
    budget: Callable[[], BudgetSpec | None] | None = None,
    on_finished: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, Any]:
    """Run a job to its end, or resume it; return its summary.

    Args:
        gpus: those that the job's instances have.
        on_open: told of the run and its journal, before the first step.
        budget: asked for what the job may spend before each step; the document's if left out.
        on_finished: awaited once the job has succeeded and needs no instance any more, before the last are gone.

    Raises:
        FolderOfOthersError: the folder may have a user's files; nothing is changed.
        LeaseHeldError: another driver runs it.
        LeaseLostError: another driver has taken it over.
        StageFailedError: it failed; the status says so too.
        JobChangedError: it was begun with another document.
        TrackingError: a tracker that it asks for is not available.
        DeadlineExceededError: `spec.activeDeadline` has passed.
        BudgetExhaustedError: the next step would take it past `spec.budget`, or the one under way has; the status says
            that it is suspended.
        StoreUnavailableError: the artifact store does not answer.
    """
    check_tracking(job, folder.root)
    await asyncio.to_thread(claim_folder, job, folder)
    lease = await take_lease(folder.root, progress.note)
    try:
        status = await asyncio.to_thread(_open_status, job, folder, lease)
        latency = await asyncio.to_thread(starting_latency, job, gpus.gpu)
        run, journal = open_run(job, folder, lease, status, make_platform, progress, gpus, latency)
        journal.budget = budget or journal.budget
        on_open(run, journal)
        await _train_and_close(run, journal)
        if on_finished is not None:
            await on_finished()
        await _settle(journal, gpus.draining_seconds)
        await _write_summary(job, folder, journal)
        return summarize(job, journal.status, journal.records)
    finally:
        # If even this can't be written the lease expires. The user should read the first error.
        with contextlib.suppress(artifacts.ArtifactError):
            await asyncio.to_thread(lease.release)


async def _train_and_close(run: TrainingRun, journal: StepJournal) -> None:
    """Take all steps, write down why they end where they do, and let go of everything."""
    try:
        journal.tracking = await asyncio.to_thread(run.lease.fenced, _open_tracking, run, journal)
        await _train_under_lease(run, journal)
    except (asyncio.CancelledError, KeyboardInterrupt):
        await _leave(journal, "Interrupted", "stopped by its user; run it again to go on")
        raise
    except BudgetExhaustedError as error:
        await _leave(journal, "Suspended", str(error))
        raise
    except (UserError, artifacts.ArtifactError, ValueError) as error:
        if not _may_pass(error):
            await _leave(journal, "Failed", str(error))
            raise
        await _leave(journal, "Interrupted", str(error))
        raise StoreUnavailableError(str(error)) from error
    finally:
        await run.capacity.close()
        await run.platform.close()
        await asyncio.to_thread(journal.tracking.close, journal.status.phase)
        await _write_summary(run.job, run.folder, journal)


async def _train_under_lease(run: TrainingRun, journal: StepJournal) -> None:
    async def keep_lease() -> None:
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            journal.heed_writes()
            try:
                await asyncio.to_thread(journal.lease.renew)
            except artifacts.ArtifactError as error:
                if not error.retryable or time.monotonic() - renewed > LEASE_SECONDS:
                    raise
            else:
                renewed = time.monotonic()

    try:
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(keep_lease()), tasks.create_task(_keep_budget(journal))]
            await _train_in_time(run, journal)
            for task in beside:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def _keep_budget(journal: StepJournal) -> None:
    """Cut the step under way once it has spent more than the budget. A smaller budget counts from the next step on."""
    begun, step = journal.budget(), journal.status.step
    while True:
        await asyncio.sleep(_BUDGET_SECONDS)
        status = journal.status
        if status.step != step:
            begun, step = journal.budget(), status.step
        money, gpu_seconds = journal.spent(time.monotonic())
        under_way = status.stage is not None and step < status.steps and gpu_seconds > status.gpu_seconds
        if under_way:
            check_spent([begun, journal.budget()], journal.spec, money, gpu_seconds, step + 1)


async def _train_in_time(run: TrainingRun, journal: StepJournal) -> None:
    deadline = run.spec.active_deadline
    if deadline is None:
        await train(run, journal)
        return
    try:
        async with asyncio.timeout(max(0.0, deadline - journal.status.seconds)) as time_left:
            await train(run, journal)
    except TimeoutError:
        if not time_left.expired():
            raise
        raise DeadlineExceededError(
            f"the job has taken longer than spec.activeDeadline, {format_duration(deadline)}; raise it to go on"
        ) from None


def _open_tracking(run: TrainingRun, journal: StepJournal) -> Tracking:
    records = committed_records(run.folder, journal.status)
    return open_tracking(run.job, run.folder.root, journal.status.uid, run.lease.number, records, run.progress.note)


def _may_pass(error: Exception) -> bool:
    """Return whether the artifact store did not answer, and may do so again by itself."""
    return isinstance(error, StoreUnavailableError) or (isinstance(error, artifacts.ArtifactError) and error.retryable)


async def _leave(journal: StepJournal, phase: Phase, message: str) -> None:
    with contextlib.suppress(LeaseLostError, artifacts.ArtifactError):
        await journal.leave(phase, message)


async def _settle(journal: StepJournal, draining_seconds: float) -> None:
    with contextlib.suppress(LeaseLostError, artifacts.ArtifactError):
        await journal.settle(within=_RELEASE_SECONDS + draining_seconds)


async def _write_summary(job: RLHFJob, folder: JobFolder, journal: StepJournal) -> None:
    with contextlib.suppress(LeaseLostError, artifacts.ArtifactError):
        # A summary must not include what is not written down.
        await journal.written()
        summary = summarize(job, journal.status, journal.records)
        content = json.dumps(summary).encode()
        await asyncio.to_thread(journal.lease.fenced, artifacts.write_bytes, folder.file("summary.json"), content)


def _open_status(job: RLHFJob, folder: JobFolder, lease: Lease) -> RLHFJobStatus:
    status = read_status(folder)
    before = begun_job(folder)
    if before is not None:
        differing = changes_between(before, job)
        names = [name for name in (*FIXED_FIELDS, "rehearsal") if any(change.within(name) for change in differing)]
        inputs = [] if names else _changed_inputs(job, folder)
        if (names or inputs) and not (status and status.step):
            # Nothing is learnt yet, so nothing is lost: a fault in the first step can be mended in the document.
            for name in (*_BEFORE_THE_FIRST_STEP, "inputs.json"):
                lease.fenced(artifacts.remove, folder.file(name))
            status = _anew(status)
        elif inputs:
            raise JobChangedError(", ".join(inputs), folder.root)
        elif names:
            raise JobChangedError(", ".join(f"spec.{name}" for name in names), folder.root)
    lease.fenced(remove_remains, folder)
    lease.fenced(write_begun_job, job, folder)
    return status or _anew(None)


def _changed_inputs(job: RLHFJob, folder: JobFolder) -> list[str]:
    """Return the data, templates and models of training whose content is not what the job was begun with."""
    before = read_digests(folder) or {}
    now = take_digests(job.spec, before)
    return [described(name, now[name]) for name in changed(before, now) if is_fixed(name)]


def begun_with(job: RLHFJob, folder: JobFolder, *, except_for: Collection[str] = ()) -> bool:
    """Return whether the job was last driven with this very document, except for some parts of its spec."""
    driven = artifacts.exists(folder.file("job.yaml"))
    return driven and all(any(map(change.within, except_for)) for change in changes_since(job, folder))


def _anew(status: RLHFJobStatus | None) -> RLHFJobStatus:
    """Return the status of a new incarnation, which owes what the one before has spent."""
    spent = ("seconds", "instance_seconds", "gpu_seconds", "idle_seconds", "cost")
    return RLHFJobStatus(uid=new_uid(), **({name: getattr(status, name) for name in spent} if status else {}))
