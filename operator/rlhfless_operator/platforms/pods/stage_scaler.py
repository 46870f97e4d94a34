"""The control of the number of a stage's pods, by the scale bounds of the Revision."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Literal

import aiohttp

from rlhfless_functions import artifacts
from rlhfless_functions.api import Preload
from rlhfless_functions.serving.preload import write_pointer
from rlhfless_operator.knative import ApiError, ConflictError, KnativeClient, NotFoundError
from rlhfless_operator.platforms.pods.job_objects import Endpoint
from rlhfless_operator.platforms.pods.manifests import DELETION_COST, MAX_SCALE, MIN_SCALE
from rlhfless_operator.platforms.pods.pod_events import newest_warning
from rlhfless_operator.platforms.pods.pod_watch import PODS
from rlhfless_operator.platforms.pods.scaling import Scale, scale_of
from rlhfless_operator.platforms.pods.stage_pods import StagePods

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
"""Seconds until a retry after the API server has refused."""
_SHORTAGE_SECONDS = 2.0
"""Seconds between checks of why pods are missing."""
_WAKE_SECONDS = 5.0
"""Time limit of the request that wakes Knative, in seconds."""


class StageScaler:
    """The scaler of one stage.

    Args:
        pods: the stage's book.
        preload: URI of the file that names the model which a new pod loads.
        keep_alive: seconds that a surplus idle pod is kept.
        on_problem: called when the problem of the stage's pods changes.
    """

    def __init__(
        self,
        client: KnativeClient,
        session: aiohttp.ClientSession,
        namespace: str,
        endpoint: Endpoint,
        pods: StagePods,
        *,
        preload: str,
        keep_alive: float,
        on_problem: Callable[[str], None],
    ) -> None:
        self._client = client
        self._revisions = client.revisions
        self._pods_api = client.resource(PODS)
        self._session = session
        self._namespace = namespace
        self._endpoint = endpoint
        self._pods = pods
        self._preload_uri = preload
        self._keep_alive = keep_alive
        self._on_problem = on_problem
        self._preload: Preload | None = None
        self._written: Preload | Literal["unknown"] | None = "unknown"
        self._applied: tuple[int, int] | None = None
        self._looked_at = 0.0
        self._review_at: float | None = None
        self._changed = asyncio.Event()
        self._changed.set()
        self._waking: asyncio.Task[None] | None = None
        self._shortage = ""
        self._reported = ""

    def preload(self, preload: Preload | None) -> None:
        """Set the model that new pods load."""
        self._preload = preload
        self.notice()

    def notice(self) -> None:
        """Look at the number of pods again, because something has changed."""
        self._changed.set()

    @property
    def problem(self) -> str:
        """The problem of the stage's pods, or why pods are missing; empty if none is known."""
        return self._pods.problem() or self._shortage

    async def run(self) -> None:
        """Control the number of pods until cancelled."""
        try:
            while True:
                await self._wait()
                try:
                    await self._adjust()
                except (ApiError, artifacts.ArtifactError) as error:
                    self._shortage = str(error)
                    self._review_at = time.monotonic() + _PAUSE_SECONDS
                self._report()
        finally:
            if self._waking is not None:
                self._waking.cancel()

    async def release(self) -> None:
        """Release all pods."""
        await self._bound(Scale(0))

    async def remove_pod(self, instance: str) -> None:
        """Replace a pod that does not answer."""
        view = self._pods.view(instance)
        if view is not None:
            try:
                await self._pods_api.delete(self._namespace, instance, uid=view.uid, grace_period_seconds=1)
            except ApiError as error:
                logger.warning("%s does not answer and can't be deleted: %s", instance, error)

    async def _wait(self) -> None:
        timeout = None if self._review_at is None else max(0.0, self._review_at - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        self._changed.clear()

    async def _adjust(self) -> None:
        await self._write_preload()
        now = time.monotonic()
        asked = None if self._applied is None else self._applied[0]
        scale = scale_of(self._pods.situation(), asked=asked, keep_alive=self._keep_alive, at=now)
        for view in self._pods.unprepared(now):
            self._pods.suspect_unprepared(view, await newest_warning(self._client, self._namespace, view.uid))
        self._review_at = _earlier(scale.review_at, self._pods.next_unprepared)
        if scale.bounds != self._applied:
            # Set deletion costs first: the ReplicaSet must not pick a working pod.
            if self._applied is None or scale.pods < self._applied[0]:
                await self._mark(now)
            await self._bound(scale)
            self._looked_at = now
        missing = scale.pods - self._pods.there
        if missing <= 0:
            self._shortage = ""
            return
        if now >= self._looked_at + _SHORTAGE_SECONDS:
            self._looked_at = now
            await self._look_into(missing)
        self._review_at = _earlier(self._review_at, self._looked_at + _SHORTAGE_SECONDS)

    async def _bound(self, scale: Scale) -> None:
        least, most = scale.bounds
        annotations = {MIN_SCALE: str(least), MAX_SCALE: str(most)}
        await self._revisions.patch(
            self._namespace, self._endpoint.revision, {"metadata": {"annotations": annotations}}
        )
        self._applied = scale.bounds

    async def _mark(self, now: float) -> None:
        """Set deletion costs to make the ReplicaSet pick the right pods."""
        for view, cost in list(self._pods.wrong_costs(now - self._keep_alive)):
            patch = {"metadata": {"uid": view.uid, "annotations": {DELETION_COST: cost}}}
            with contextlib.suppress(NotFoundError, ConflictError):
                await self._pods_api.patch(self._namespace, view.name, patch)

    async def _look_into(self, missing: int) -> None:
        """Find out why pods are missing.

        If there are none, send a request: an autoscaler that has just started reads no bounds before one.
        """
        if self._pods.there == 0 and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake())
        revision = await self._revisions.get(self._namespace, self._endpoint.revision)
        for kind in ("ResourcesAvailable", "ContainerHealthy"):
            condition = revision.status.condition(kind)
            if condition is not None and condition.status == "False":
                self._shortage = f"{missing} pods are missing: {condition.reason}: {condition.message}"
                return

    async def _wake(self) -> None:
        headers = {"host": self._endpoint.host} if self._endpoint.host else {}
        timeout = aiohttp.ClientTimeout(total=_WAKE_SECONDS)
        # Only its arrival matters, not its result.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(f"{self._endpoint.url}/readyz", headers=headers, timeout=timeout):
                pass

    async def _write_preload(self) -> None:
        if self._preload == self._written:
            return
        preload = self._preload
        await asyncio.to_thread(write_pointer, self._preload_uri, preload)
        self._written = preload

    def _report(self) -> None:
        problem = self.problem
        if problem != self._reported:
            self._reported = problem
            if problem:
                logger.warning("%s pods of %s: %s", self._pods.stage, self._endpoint.revision, problem)
                self._on_problem(f"{self._pods.stage}: {problem}")


def _earlier(one: float | None, other: float | None) -> float | None:
    times = [each for each in (one, other) if each is not None]
    return min(times, default=None)
