"""The driver of a job on a cluster: that of `rlhfless run`, with its status mirrored into the resource."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from rlhfless_functions import artifacts
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.context import OperatorContext
from rlhfless_operator.controller.metering import Metering
from rlhfless_operator.controller.prometheus import JobMeter
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.controller.status_updates import StatusUpdates
from rlhfless_operator.controller.tenancy.threads import in_time
from rlhfless_operator.job.actor_range import ActorRange, preparer_range
from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.platforms.base import StateChange, StateListener
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from rlhfless_operator.platforms.job_platform import JobPlatform, JobShelter
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.report import write_report
from rlhfless_operator.training.driver import drive
from rlhfless_operator.training.journal.budget import BudgetExhaustedError
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.requests.rehearsal import emulation_of
from rlhfless_operator.training.run import AvailableGpus, TrainingRun

_logger = logging.getLogger(__name__)


async def run_driver(
    context: OperatorContext,
    resource: JobResource,
    job: RLHFJob,
    folder: JobFolder,
    actors: ActorRange,
    updates: StatusUpdates,
    meter: JobMeter,
    *,
    on_platform: Callable[[JobPlatform], None],
    budget: Callable[[], BudgetSpec | None],
    on_finished: Callable[[], Awaitable[None]],
) -> None:
    """Drive a job to its end, and write a report.

    Args:
        actors: number of generation instances that a step may use.
        on_platform: called with the job's platform before anything is created on it.
        budget: returns what the job may spend; called before each step.
        on_finished: awaited once the job has succeeded, before its last pods are gone. Knative ends the last pod of a
            Service 6 s after its last request; if the Service is deleted, the pod ends immediately.

    Raises:
        Exception: any exception of `drive`.
    """

    def make_platform(on_state: StateListener) -> JobPlatform:
        def both(change: StateChange) -> None:
            on_state(change)
            meter.observe(change)

        tell = partial(updates.tell, generation=resource.generation)
        platform = context.make_platform(member, job, folder.root, both, tell)
        metering = Metering(meter, lambda: updates.found_services(resource.generation))
        platform.surround(metering, *context.pools.hooks(member, job, tell))
        on_platform(platform)
        if shelter is not None:
            shelter.platform = platform
        return platform

    def on_open(run: TrainingRun, journal: StepJournal) -> None:
        meter.attach(run, journal)
        member.costs = run.capacity.switch_cost

        def show(status: RLHFJobStatus) -> None:
            updates.mirror(status)
            done = [record for record in journal.records if record.step <= status.step]
            updates.learnt_from(done, generation=resource.generation)

        show(journal.status)
        updates.driven_by(run.lease.number)
        journal.on_status = show
        run.progress.on_stage = lambda: updates.under_way(run.progress.at_once)
        after = f" after step {journal.status.step}" if journal.status.step else ""
        updates.begin(conditions.started(f"goes on{after}" if after else "has begun"), resource)

    def note(text: str) -> None:
        _logger.info("%s/%s: %s", resource.namespace, resource.name, text)

    shelter = JobShelter() if job.spec.may_let_actors_go else None
    # The files that it reads, and the stores that it asks, are the job's.
    emulation = await in_time(_emulation_of, job)
    with context.pools.joined(job, resource) as member:
        member.emulation = emulation
        gpus = _available(context, resource, job, member, actors, shelter)
        try:
            await drive(
                *(job, folder, make_platform, LiveProgress(on_note=note), gpus),
                on_open=on_open,
                budget=budget,
                on_finished=on_finished,
            )
        except BudgetExhaustedError:
            await _report(folder, note)
            raise
    await _report(folder, note)


def _available(
    context: OperatorContext,
    resource: JobResource,
    job: RLHFJob,
    member: PoolMember,
    actors: ActorRange,
    shelter: JobShelter | None,
) -> AvailableGpus:
    """Return the GPUs for a job's instances."""
    pool = context.settings.pools.get(member.pool)
    room = _room(member, pool) if pool is not None else None
    return AvailableGpus(
        actors,
        preparer_range(job.spec, actors, member.gpus, queued=resource.queue is not None),
        shared=room if member.sleeps else None,
        whole=None if member.sleeps else room,
        draining_seconds=context.settings.draining_seconds,
        contention=lambda: context.pools.contention(member),
        shelter=shelter,
        gpu=pool.accelerator if pool is not None else None,
    )


def _room(member: PoolMember, pool: PoolSettings) -> SharedGpus:
    """Return the GPUs that a job has for itself if no other job wants them."""
    most = pool.gpus
    if member.sleeps:
        together = pool.gpus_per_group
        most = -(-member.most_at_once // together) * together
    return SharedGpus(min(most, pool.share_of(member.namespace)), member.gpus)


def _emulation_of(job: RLHFJob) -> EmulationSettings | None:
    try:
        return emulation_of(job)
    except artifacts.ArtifactError as error:
        raise ValueError(f"spec.rehearsal.trace: {error}") from error


async def _report(folder: JobFolder, note: Callable[[str], None]) -> None:
    try:
        await asyncio.to_thread(write_report, folder.root)
    except (artifacts.ArtifactError, ValueError) as error:
        note(f"no report was written: {error}")
