"""One job's supervisor: from its resource's creation to its rest, whatever happens to it on the way.

It runs the very driver that `rlhfless run` runs. The truth of the training is in the job's folder; here the resource's
status is kept in step with it, and the user's wishes (suspend, delete, another document) are carried to the driver.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from rlhfless_functions import artifacts
from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.conditions import Reason, Transition
from rlhfless_operator.controller.jobs_api import (
    ApiRefusedError,
    ApiUnavailableError,
    ConflictError,
    JobsApi,
    ResourceGoneError,
)
from rlhfless_operator.controller.metering import ClusterPlatform, MeteredPlatform
from rlhfless_operator.controller.metrics import OperatorMetrics
from rlhfless_operator.controller.outcome import Outcome, outcome_of, pause_before_restart
from rlhfless_operator.controller.ownership import FolderTakenError, claim
from rlhfless_operator.controller.resource import (
    NO_RESTART_FIELDS,
    JobResource,
    describe_faults,
    expiry,
    next_action,
    resolved,
    root_of,
)
from rlhfless_operator.controller.status_writer import StatusWriter, SupersededError
from rlhfless_operator.platforms.base import PlatformUnavailableError, StateChange, StateListener
from rlhfless_operator.resource_status import DriverStatus, ResourceStatus, read_resource_status
from rlhfless_operator.spec import RLHFJob
from rlhfless_operator.training.driver import begun_with, drive
from rlhfless_operator.training.folder import JobFolder
from rlhfless_operator.training.progress import LiveProgress
from rlhfless_operator.training.run import TrainingRun, read_status
from rlhfless_operator.training.status import RLHFJobStatus
from rlhfless_operator.validation import InvalidJobError

_logger = logging.getLogger(__name__)

_MIRRORED = [name for name in RLHFJobStatus.model_fields if name not in ("phase", "message")]


class Stopped(Protocol):
    """What says that the supervisor is to end."""

    def is_set(self) -> bool:
        """Whether it is to end."""


class MakePlatform(Protocol):
    """Says where the functions of a job run."""

    def __call__(self, resource: JobResource, job: RLHFJob, root: str, on_state: StateListener) -> ClusterPlatform:
        """A platform that is not open yet.

        Args:
            job: with resolved paths.
            root: URI of the job's folder.
            on_state: told of every change of an instance.
        """


@dataclass(frozen=True)
class Pacing:
    """How long the controller waits for what, in seconds."""

    tick: float = 5.0
    """Between two heartbeats."""
    lease: float = 5.0
    """Before a job that another driver has is tried again."""
    first_restart: float = 10.0
    """Before the first restart after an internal failure; doubled with each in a row."""
    longest_restart: float = 360.0
    """Before any restart."""
    services: float = 10.0
    """Before a job whose Services can't be had is tried again."""
    closing: float = 25.0
    """For a driver to let go of everything; then it is abandoned."""
    farewell: float = 3.0
    """For the last status when the operator stops."""


@dataclass(frozen=True)
class Workplace:
    """What all supervisors of an operator share."""

    api: JobsApi
    make_platform: MakePlatform
    metrics: OperatorMetrics
    identity: str
    """This operator's process."""
    files: str
    """Folder in the functions' pods that relative paths of a job are taken from."""
    artifacts: str
    """What a relative `spec.artifacts.uri` is taken from."""
    pacing: Pacing = Pacing()


class Supervisor:
    """Takes care of one job.

    Args:
        place: shared by all jobs.
        body: the resource; a view that the watch keeps up to date.
        stopped: set when the supervisor is to end.
        post: makes an event of a transition.
    """

    def __init__(
        self, place: Workplace, body: Mapping[str, Any], stopped: Stopped, post: Callable[[Transition], None]
    ) -> None:
        self._place = place
        self._body = body
        self._stopped = stopped
        self._post = post
        self._changed = asyncio.Event()
        self._platform: ClusterPlatform | None = None
        content = dict(body.get("status") or {})
        resource = self.resource
        self._writer = StatusWriter(place.api, resource, content, read_resource_status(content), place.identity)
        self._meter = place.metrics.job(resource.namespace, resource.name)
        self.heartbeat = time.monotonic()
        """When it last showed that it lives, in monotonic seconds."""

    @property
    def resource(self) -> JobResource:
        """The resource as it was seen last."""
        return JobResource.of(self._body)

    @property
    def status(self) -> ResourceStatus:
        """The job's status, published or about to be."""
        return self._writer.status

    def notice(self) -> None:
        """The resource has changed, or the supervisor is to stop."""
        with contextlib.suppress(KeyError):
            self._writer.seen(self.resource, dict(self._body.get("status") or {}))
        self._changed.set()

    async def run(self) -> None:
        """Take care of the job until stopped."""
        while not self._stopped.is_set():
            writing = asyncio.create_task(self._writer.run())
            try:
                await self._attend(writing)
            except ResourceGoneError:
                await self._wait()
            except (SupersededError, ApiRefusedError) as error:
                _logger.warning("%s", error)
                await self._pause(self.resource, self._place.pacing.lease)
                self._start_over()
            finally:
                writing.cancel()
                with contextlib.suppress(asyncio.CancelledError, ResourceGoneError, SupersededError, ApiRefusedError):
                    await writing

    async def _attend(self, writing: asyncio.Task[None]) -> None:
        while not self._stopped.is_set():
            self._changed.clear()
            match next_action(self.resource, self.status):
                case "drive":
                    await self._drive(writing)
                case "suspend":
                    await self._enter(conditions.suspended(), self.resource)
                case "expire":
                    await self._expire()
                case "rest":
                    await self._wait()

    def _start_over(self) -> None:
        content = dict(self._body.get("status") or {})
        place = self._place
        self._writer = StatusWriter(place.api, self.resource, content, read_resource_status(content), place.identity)

    # --- driving ---

    async def _drive(self, writing: asyncio.Task[None]) -> None:
        resource = self.resource
        try:
            job = resource.job()
        except InvalidJobError as invalid:
            await self._enter(conditions.failed(Reason.INVALID_SPEC, describe_faults(invalid)), resource)
            return
        job = resolved(job, self._place.files)
        folder = JobFolder(root_of(job, self._place.artifacts))
        error: BaseException | None
        try:
            if (done := await asyncio.to_thread(self._look_at_folder, folder, resource, job)) is not None:
                await self._enter(done, resource)
                return
            error = await self._drive_until_wanted_otherwise(resource, job, folder, writing)
        except FolderTakenError as taken:
            await self._enter(conditions.failed(Reason.FOLDER_TAKEN, str(taken)), resource)
            return
        except (artifacts.ArtifactError, ValueError) as unreadable:
            error = unreadable
        if error is not None:
            await self._follow(outcome_of(error), resource)

    def _look_at_folder(self, folder: JobFolder, resource: JobResource, job: RLHFJob) -> Transition | None:
        """Claim the folder; a transition where there is nothing to drive."""
        claim(folder, resource)
        status = read_status(folder)
        if status is None:
            return None
        if status.phase == "Succeeded" and (job.spec.steps is None or job.spec.steps <= status.step):
            self._mirror(status)
            return _succeeded(status, folder)
        gave_up = self.status.phase == "Failed" and self.status.reason in (
            Reason.TRAINING_FAILED,
            Reason.DEADLINE_EXCEEDED,
        )
        if gave_up and begun_with(job, folder, except_for=NO_RESTART_FIELDS):
            return conditions.failed(Reason(self.status.reason), self.status.message)
        return None

    async def _drive_until_wanted_otherwise(
        self, resource: JobResource, job: RLHFJob, folder: JobFolder, writing: asyncio.Task[None]
    ) -> BaseException | None:
        """Run a driver until it ends, or until the user or the cluster wants something else.

        Returns:
            What the driver ended with; None if it did its work, or was stopped.
        """
        driving = asyncio.create_task(self._run_driver(resource, job, folder))
        try:
            while not driving.done() and not self._wants_other(resource):
                if writing.done():
                    writing.result()
                self._changed.clear()
                generation = self.resource.generation
                if generation != self.status.observed_generation and self.status.phase == "Running":
                    self._writer.update(self.status.model_copy(update={"observed_generation": generation}))
                await self._wait(driving, writing)
            by_itself = driving.done()
        finally:
            await self._end(driving)
            self._meter.detach()
        if not by_itself:
            if self._stopped.is_set() and not self.resource.deleted:
                await self._say_farewell()
            return None
        if (error := driving.exception()) is None:
            await self._enter(_succeeded(self.status, folder), self.resource)
        return error

    async def _run_driver(self, resource: JobResource, job: RLHFJob, folder: JobFolder) -> None:
        opened: list[TrainingRun] = []

        def make_platform(on_state: StateListener) -> MeteredPlatform:
            def both(change: StateChange) -> None:
                on_state(change)
                self._meter.observe(change)

            self._platform = self._place.make_platform(resource, job, folder.root, both)
            return MeteredPlatform(self._platform, self._meter, lambda: self._found_services(resource))

        def on_open(run: TrainingRun) -> None:
            opened.append(run)
            self._meter.attach(run)
            self._mirror(run.status)
            run.on_status = self._mirror
            driver = DriverStatus(operator=self._place.identity, lease=run.lease.number)
            self._writer.update(self.status.model_copy(update={"driver": driver}))
            after = f", after step {run.status.step}" if run.status.step else ""
            self._begin(conditions.started(f"driven by {self._place.identity}{after}"), resource)

        def note(text: str) -> None:
            _logger.info("%s/%s: %s", resource.namespace, resource.name, text)

        await drive(job, folder, make_platform, LiveProgress(on_note=note), on_open=on_open)

    async def _end(self, driving: asyncio.Task[None]) -> None:
        if driving.done():
            return
        driving.cancel()
        await asyncio.wait({driving}, timeout=self._place.pacing.closing)
        if not driving.done():
            _logger.error("a driver did not let go within %g s, and is abandoned", self._place.pacing.closing)
        elif not driving.cancelled() and (error := driving.exception()) is not None:
            _logger.warning("a driver that was stopped ended with %s: %s", type(error).__name__, error)

    def _wants_other(self, resource: JobResource) -> bool:
        """Whether a driver that was started for `resource` has to end."""
        now = self.resource
        return self._stopped.is_set() or now.deleted or now.suspended or now.driven_spec != resource.driven_spec

    async def _follow(self, outcome: Outcome, resource: JobResource) -> None:
        pacing = self._place.pacing
        match outcome.kind:
            case "failed":
                await self._enter(conditions.failed(outcome.reason, outcome.message), resource)
            case "wait":
                await self._enter(conditions.waiting("Pending", outcome.reason, outcome.message), resource)
                await self._pause(resource, pacing.lease)
            case "no_services":
                await self._enter(conditions.without_services("Pending", outcome.message), resource)
                await self._pause(resource, pacing.services)
            case "restart":
                await self._restart(outcome, resource)

    async def _restart(self, outcome: Outcome, resource: JobResource) -> None:
        restarts, limit = self.status.restarts + 1, self.resource.backoff_limit
        if restarts > limit:
            message = f"{outcome.message}; given up after {restarts - 1} restarts (spec.backoffLimit)"
            await self._enter(conditions.failed(Reason.BACKOFF_LIMIT_EXCEEDED, message), resource)
            return
        self._writer.update(self.status.model_copy(update={"restarts": restarts}))
        pause = pause_before_restart(restarts, self._place.pacing.first_restart, self._place.pacing.longest_restart)
        message = f"{outcome.message}; restart {restarts} of {limit} in {pause:g} s"
        await self._enter(conditions.waiting("Pending", Reason.RESTARTING, message), resource)
        await self._pause(resource, pause)

    # --- status ---

    def _mirror(self, status: RLHFJobStatus) -> None:
        """The driver has written a status into the job's folder."""
        changes = {name: getattr(status, name) for name in _MIRRORED}
        if status.step > self.status.step:
            changes["restarts"] = 0
        changes["progress"] = f"{status.step}/{status.steps}" if status.steps else ""
        self._writer.update(self.status.model_copy(update=changes))

    def _found_services(self, resource: JobResource) -> None:
        status = self.status
        found = conditions.set_condition(
            status.conditions,
            conditions.SERVICES_READY,
            True,
            Reason.SERVICES_CREATED,
            "",
            generation=resource.generation,
            now=_now(),
        )
        self._writer.update(status.model_copy(update={"conditions": found}))

    def _begin(self, transition: Transition, resource: JobResource) -> None:
        before = self.status
        after = conditions.apply(before, transition, generation=resource.generation, now=_now())
        self._writer.update(after)
        self._place.metrics.show_phase(resource.namespace, resource.name, after.phase)
        if (before.phase, before.reason) != (after.phase, after.reason):
            self._post(transition)

    async def _enter(self, transition: Transition, resource: JobResource) -> None:
        """Begin a phase, and see to it that the server knows."""
        if transition.phase in ("Succeeded", "Failed", "Suspended"):
            await self._remove_services()
        self._begin(transition, resource)
        flushing = asyncio.create_task(self._writer.flush())
        try:
            while not flushing.done():
                await self._wait(flushing)
            flushing.result()
        finally:
            flushing.cancel()

    async def _remove_services(self) -> None:
        platform, self._platform = self._platform, None
        if platform is not None:
            try:
                await platform.remove()
            except PlatformUnavailableError as error:
                _logger.warning("Services are left at no pods until the job is deleted: %s", error)

    async def _say_farewell(self) -> None:
        message = "the operator was stopped; the next one goes on from here"
        farewell = conditions.waiting("Interrupted", Reason.OPERATOR_STOPPED, message)
        with contextlib.suppress(TimeoutError, SupersededError, ResourceGoneError):
            async with asyncio.timeout(self._place.pacing.farewell):
                await self._enter(farewell, self.resource)

    # --- waiting ---

    async def _wait(self, *tasks: asyncio.Task[None], seconds: float | None = None) -> None:
        """Wait for a change, for a task's end, or for a while, at most a heartbeat long."""
        self.heartbeat = time.monotonic()
        tick = self._place.pacing.tick
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
        """Wait, unless something else is wanted."""
        until = time.monotonic() + seconds
        while not self._wants_other(resource) and (left := until - time.monotonic()) > 0:
            self._changed.clear()
            await self._wait(seconds=left)

    async def _expire(self) -> None:
        resource = self.resource
        at = expiry(resource, self.status)
        left = (at - datetime.now(UTC)).total_seconds() if at is not None else self._place.pacing.tick
        if left > 0 or at is None:
            await self._wait(seconds=left)
            return
        try:
            await self._place.api.delete(resource.namespace, resource.name, resource.uid)
            self._changed.clear()
        except (ApiUnavailableError, ConflictError) as error:
            _logger.warning("%s/%s: not deleted yet: %s", resource.namespace, resource.name, error)
        await self._wait()


def _succeeded(status: RLHFJobStatus, folder: JobFolder) -> Transition:
    return conditions.succeeded(f"all {status.step} steps are done; the model is in {folder.export}")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
