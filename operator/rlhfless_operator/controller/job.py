"""The supervisor of one job, from its resource's creation until nothing is left to do.

It runs the same driver as `rlhfless run`. The job's folder holds the state of training. The supervisor keeps the
resource's status up to date with it, and passes the user's changes (suspend, delete, a new document) to the driver.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from rlhfless_functions import artifacts
from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.conditions import Reason, Transition
from rlhfless_operator.controller.context import OperatorContext
from rlhfless_operator.controller.driving import run_driver
from rlhfless_operator.controller.outcome import Outcome, outcome_of, pause_before_restart
from rlhfless_operator.controller.queueing import within
from rlhfless_operator.controller.resource import (
    NO_RESTART_FIELDS,
    JobResource,
    describe_faults,
    expiry,
    next_action,
    resolved,
)
from rlhfless_operator.controller.status_updates import Post, StatusUpdates
from rlhfless_operator.controller.status_writer import ResourceGoneError, SupersededError
from rlhfless_operator.controller.tenancy.folders import JobPlace, OutsideStoreError, place_of
from rlhfless_operator.controller.tenancy.mounts import check_mounts
from rlhfless_operator.controller.tenancy.ownership import FolderTakenError, claim
from rlhfless_operator.controller.tenancy.threads import Crew, LinkedFolderError, check_links, in_time
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.instance_prices import UnknownPriceError, instance_prices
from rlhfless_operator.job.reading.validation import InvalidJobError
from rlhfless_operator.job.resource_status import ResourceStatus
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import ApiError
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.driver import begun_with
from rlhfless_operator.training.journal.begun_job import Change, changes_since, named
from rlhfless_operator.training.journal.step_journal import read_status

_logger = logging.getLogger(__name__)


class Stopped(Protocol):
    """The event that tells whether the supervisor must end."""

    def is_set(self) -> bool:
        """Return whether it must end."""


class Supervisor:
    """Supervises one job.

    Args:
        context: the context that all jobs share.
        body: the resource; a view that the watch updates.
        stopped: set when the supervisor must end.
        post: posts an event for a transition.
    """

    def __init__(self, context: OperatorContext, body: Mapping[str, Any], stopped: Stopped, post: Post) -> None:
        self._context = context
        self._body = body
        self._stopped = stopped
        self._post = post
        self._changed = asyncio.Event()
        self._platform: JobPlatform | None = None
        resource = self.resource
        self._meter = context.metrics.job(resource.namespace, resource.name)
        self._updates = StatusUpdates(context, resource, dict(body.get("status") or {}), post)
        self._crew: tuple[JobPlace, Crew] | None = None
        self._read: tuple[Mapping[str, Any], RLHFJob] | None = None
        self._queued = False
        self._asked_queue = 0.0
        self.heartbeat = time.monotonic()
        """Time of its last sign of life, in monotonic seconds."""

    @property
    def resource(self) -> JobResource:
        """The resource as last seen."""
        return JobResource.of(self._body)

    @property
    def status(self) -> ResourceStatus:
        """The job's newest status, even if it is not published yet."""
        return self._updates.status

    def notice(self) -> None:
        """Tell the supervisor that the resource has changed, or that it must stop."""
        self._updates.writer.seen(self.resource, dict(self._body.get("status") or {}))
        self._changed.set()

    async def run(self) -> None:
        """Supervise the job until stopped."""
        while not self._stopped.is_set():
            writing = asyncio.create_task(ending_of(self._updates.writer.run()))
            try:
                await self._attend(writing)
            except ResourceGoneError:
                await self._wait()
            except SupersededError as error:
                _logger.warning("%s", error)
                await self._pause(self.resource, self._context.pacing.lease)
                content = dict(self._body.get("status") or {})
                self._updates = StatusUpdates(self._context, self.resource, content, self._post)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def _attend(self, writing: asyncio.Task[Exception | None]) -> None:
        while not self._stopped.is_set():
            self._changed.clear()
            match next_action(self.resource, self.status):
                case "drive":
                    await self._drive(writing)
                case "suspend":
                    await self._enter(conditions.suspended(), self.resource)
                case "expire":
                    await self._expire()
                case "none":
                    await self._wait()

    # --- driving ---

    async def _drive(self, writing: asyncio.Task[Exception | None]) -> None:
        resource = self.resource
        try:
            job = await self._document(resource)
            await self._drive_job(resource, job, writing)
        except InvalidJobError as invalid:
            await self._enter(conditions.failed(Reason.INVALID_SPEC, describe_faults(invalid)), resource)
        except (UnknownPriceError, OutsideStoreError) as refusal:
            field = f"spec.prices.{refusal.field}: " if isinstance(refusal, UnknownPriceError) else ""
            await self._enter(conditions.failed(Reason.INVALID_SPEC, f"{field}{refusal}"), resource)
        except (FolderTakenError, LinkedFolderError) as taken:
            await self._enter(conditions.failed(Reason.FOLDER_TAKEN, str(taken)), resource)
        except (SupersededError, ResourceGoneError):
            raise
        except Exception as error:
            await self._follow(outcome_of(error), resource)

    async def _document(self, resource: JobResource) -> RLHFJob:
        """Return the job of the resource's document, which is read once."""
        if self._read is None or self._read[0] != resource.spec:
            async with self._context.reading[resource.namespace]:
                job = await asyncio.to_thread(resource.job)
            self._read = resource.spec, job
        return self._read[1]

    async def _drive_job(self, resource: JobResource, job: RLHFJob, writing: asyncio.Task[Exception | None]) -> None:
        """Drive a job, unless there is nothing to drive.

        Raises:
            Exception: the one that ended the driver.
        """
        settings = self._context.settings
        bases = self._context.artifacts, settings.further_artifacts
        place = place_of(job.spec.artifacts.uri, resource.namespace, resource.name, *bases)
        instance_prices(job.spec)
        folder = JobFolder(place.root)
        if self._crew is None or self._crew[0] != place:
            # The same threads for each try: those that wait for a store are counted.
            readable = artifacts.join(place.base, resource.namespace), self._context.files
            self._crew = place, Crew(*place, readable)
        with self._crew[1].at_work():
            job = await in_time(resolved, job, self._context.files)
            job = job.on_cluster(settings.pods_in(resource.namespace))
            if (done := await in_time(self._look_at_folder, folder, resource, job)) is not None:
                await self._enter(done, resource)
                return
            if resource.queue is None and self._queued:
                await self._context.queues.leave(resource)
            self._queued = resource.queue is not None
            actors = await self._context.room.actors(resource, job)
            if self._queued:
                admission = await self._context.queues.admit(resource, job, actors)
                if admission.state != "admitted":
                    await self._enter(conditions.waiting("Pending", Reason.QUEUED, admission.message), resource)
                    await self._pause(resource, self._context.pacing.queue)
                    return
                actors = within(actors, admission)
            if (error := await self._drive_while_wanted(resource, job, folder, actors, writing)) is not None:
                raise error

    def _look_at_folder(self, folder: JobFolder, resource: JobResource, job: RLHFJob) -> Transition | None:
        """Claim the folder. Returns a transition if there is nothing to drive."""
        check_mounts(job, resource, folder.root, self._context.settings)
        check_links(folder.root)
        claim(folder, resource)
        status = read_status(folder)
        if status is None:
            return None
        unchanged = begun_with(job, folder, except_for=NO_RESTART_FIELDS)
        if status.phase == "Succeeded" and (unchanged or (job.spec.steps or status.steps + 1) <= status.step):
            self._updates.mirror(status)
            return _succeeded(status, folder, [] if unchanged else changes_since(job, folder))
        if self.status.phase == "Failed" and unchanged:
            reason = self.status.reason
            if reason in (Reason.TRAINING_FAILED, Reason.DEADLINE_EXCEEDED):
                return conditions.failed(Reason(reason), self.status.message)
        return None

    async def _drive_while_wanted(
        self,
        resource: JobResource,
        job: RLHFJob,
        folder: JobFolder,
        actors: ActorRange,
        writing: asyncio.Task[Exception | None],
    ) -> BaseException | None:
        """Run a driver until it ends, or until the user or the cluster wants something else.

        Returns:
            The exception that ended the driver; None if it finished or was stopped.
        """
        driving = asyncio.create_task(ending_of(self._run_driver(resource, job, folder, actors)))
        try:
            while not driving.done() and not self._wants_other(resource):
                if writing.done() and (failure := writing.result()) is not None:
                    raise failure
                self._changed.clear()
                if self.status.phase == "Running":
                    self._updates.observed(self.resource.generation)
                if resource.queue is not None and (why := await self._withdrawn(resource)) is not None:
                    _logger.info("%s/%s: stopped by Kueue: %s", resource.namespace, resource.name, why)
                    break
                await self._wait(driving, writing)
            by_itself = driving.done()
        finally:
            await self._end(driving)
            self._meter.detach()
        if not by_itself:
            if self._stopped.is_set() and not self.resource.deleted:
                await self._say_farewell()
            return None
        if (error := driving.result()) is None:
            await self._enter(_succeeded(self.status, folder), self.resource)
        return error

    async def _run_driver(self, resource: JobResource, job: RLHFJob, folder: JobFolder, actors: ActorRange) -> None:
        def opened(platform: JobPlatform) -> None:
            self._platform = platform

        await run_driver(
            *(self._context, resource, job, folder, actors, self._updates, self._meter),
            on_platform=opened,
            budget=lambda: self.resource.budget(job.spec.budget),
            on_finished=self._remove_services,
        )

    async def _withdrawn(self, resource: JobResource) -> str | None:
        if time.monotonic() - self._asked_queue < self._context.pacing.queue:
            return None
        self._asked_queue = time.monotonic()
        return await self._context.queues.withdrawn(resource)

    async def _end(self, driving: asyncio.Task[Exception | None]) -> None:
        if driving.done():
            return
        driving.cancel()
        await asyncio.wait({driving}, timeout=self._context.pacing.closing)
        if not driving.done():
            _logger.error(
                "a driver did not release its instances within %g s and is abandoned", self._context.pacing.closing
            )
        elif not driving.cancelled() and (error := driving.result()) is not None:
            _logger.warning("a driver that was stopped ended with %s: %s", type(error).__name__, error)

    def _wants_other(self, resource: JobResource) -> bool:
        """Return whether a driver that was started for `resource` must end."""
        now = self.resource
        other = now.driven_spec != resource.driven_spec or now.queue != resource.queue
        return self._stopped.is_set() or now.deleted or now.suspended or other

    async def _follow(self, outcome: Outcome, resource: JobResource) -> None:
        pacing = self._context.pacing
        match outcome.kind:
            case "failed":
                await self._enter(conditions.failed(outcome.reason, outcome.message), resource)
            case "suspended":
                await self._enter(conditions.out_of_budget(outcome.message), resource)
            case "wait":
                await self._enter(conditions.waiting("Pending", outcome.reason, outcome.message), resource)
                await self._pause(resource, pacing.lease)
            case "no_services":
                await self._enter(conditions.without_services("Pending", outcome.message), resource)
                await self._pause(resource, pacing.services)
            case "restart":
                await self._restart(outcome, resource)

    async def _restart(self, outcome: Outcome, resource: JobResource) -> None:
        limit, pacing = self.resource.backoff_limit, self._context.pacing
        if self.status.restarts >= limit:
            message = f"{outcome.message}; failed after {self.status.restarts} restarts (spec.backoffLimit)"
            await self._enter(conditions.failed(Reason.BACKOFF_LIMIT_EXCEEDED, message), resource)
            return
        restarts = self._updates.restarting()
        pause = pause_before_restart(restarts, pacing.first_restart, pacing.longest_restart)
        message = f"{outcome.message}; restart {restarts} of {limit} in {pause:g} s"
        await self._enter(conditions.waiting("Pending", Reason.RESTARTING, message), resource)
        await self._pause(resource, pause)

    # --- phases ---

    async def _enter(self, transition: Transition, resource: JobResource) -> None:
        """Begin a phase, and publish it."""
        if transition.phase in ("Succeeded", "Failed", "Suspended"):
            await self._remove_services()
            if resource.queue is not None:
                await self._context.queues.leave(resource)
        self._updates.begin(transition, resource)
        flushing = asyncio.create_task(ending_of(self._updates.writer.flush()))
        try:
            while not flushing.done():
                await self._wait(flushing)
            if (failure := flushing.result()) is not None:
                raise failure
        finally:
            flushing.cancel()

    async def _remove_services(self) -> None:
        platform, self._platform = self._platform, None
        if platform is not None:
            try:
                await platform.remove()
            except PlatformUnavailableError as error:
                _logger.warning(
                    "Services could not be removed; they stay without pods until the job is deleted: %s", error
                )

    async def _say_farewell(self) -> None:
        message = "the operator was stopped; the next one resumes the job"
        farewell = conditions.waiting("Interrupted", Reason.OPERATOR_STOPPED, message)
        with contextlib.suppress(TimeoutError, SupersededError, ResourceGoneError):
            async with asyncio.timeout(self._context.pacing.farewell):
                await self._enter(farewell, self.resource)

    async def _expire(self) -> None:
        resource = self.resource
        at = expiry(resource, self.status)
        left = (at - datetime.now(UTC)).total_seconds() if at is not None else self._context.pacing.tick
        if left > 0:
            await self._wait(seconds=left)
            return
        try:
            await self._context.jobs.delete(resource.namespace, resource.name, uid=resource.uid)
        except ApiError as error:
            _logger.warning("%s/%s: not deleted yet: %s", resource.namespace, resource.name, error)
        await self._wait()

    # --- waiting ---

    async def _wait(self, *tasks: asyncio.Task[Any], seconds: float | None = None) -> None:
        """Wait for a change, a task's end, or some seconds; at most for one heartbeat."""
        self.heartbeat = time.monotonic()
        tick = self._context.pacing.tick
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait(
                {changed, *tasks},
                timeout=tick if seconds is None else min(tick, seconds),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            changed.cancel()

    async def _pause(self, resource: JobResource, seconds: float) -> None:
        """Wait, unless the user or the cluster wants something else."""
        until = time.monotonic() + seconds
        while not self._wants_other(resource) and (left := until - time.monotonic()) > 0:
            self._changed.clear()
            await self._wait(seconds=left)


async def ending_of(work: Awaitable[None]) -> Exception | None:
    """Return the exception that ends a supervisor's work; None if the work was completed.

    A task must not raise it: while the operator stops, kopf treats an exception of any task as the operator's.
    """
    try:
        await work
    except Exception as error:
        return error
    return None


def _succeeded(status: RLHFJobStatus, folder: JobFolder, since: Sequence[Change] = ()) -> Transition:
    remark = (
        f"; since then {named(since)}, which has no effect on a finished job; create a new job for it" if since else ""
    )
    return conditions.succeeded(f"all {status.step} steps are done; the model is in {folder.export}{remark}")
