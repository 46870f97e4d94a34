"""Platforms under test, on a cluster or an emulation of one, and what is asked of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rlhfless_functions.api import Event, ExportRequest, Stage, Started
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.knative import KnativeClient, KubernetesObject
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.knative import KnativePlatform
from rlhfless_operator.platforms.pods.environment_manifests import EnvironmentFunction
from rlhfless_operator.platforms.pods.manifests import JobIdentity, SlotsWanted, StageFunction
from rlhfless_operator.platforms.pods.node_places import NodePlaces
from rlhfless_operator.platforms.pods.pod_watch import PODS, Pod, PodWatch
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.platforms.turns.slot_pool import SlotPool, SlotShare
from tests.jobs import export_request

DEADLINE_SECONDS = 150.0
"""For anything to come about, on a machine that is busy with something else."""


async def until(condition: Callable[[], bool], what: Callable[[], object] = lambda: "") -> None:
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"it did not come about: {what()}") from None


@dataclass
class Slots:
    """Slots of a namespace, and the jobs that use them: each with so many at a time, of an instance `largest`."""

    pool: SlotPool
    jobs: list[PoolMember]
    gpus: int
    largest: int

    def share_of(self, job: JobIdentity) -> SlotShare:
        instances: dict[Stage, int] = {"generation": self.gpus // self.largest}
        gpus: dict[Stage, int] = {"generation": self.largest}
        member = PoolMember(job.uid, job.namespace, job.name, gpus, jobs=self.jobs, instances=instances)
        self.jobs.append(member)
        return SlotShare(self.pool, member)


@dataclass
class JobUnderTest:
    """A platform, and what it has told."""

    client: KnativeClient
    watch: PodWatch
    owner: KubernetesObject
    platform: KnativePlatform
    changes: list[StateChange] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def states(self, instance: str) -> list[str]:
        return [change.state for change in self.changes if change.instance == instance]

    def now(self, *states: str) -> set[str]:
        """The instances that are in one of these states."""
        newest = {change.instance: change.state for change in self.changes}
        return {instance for instance, current in newest.items() if current in states}

    async def until(self, count: int, *states: str) -> set[str]:
        """Wait until so many are."""
        await until(lambda: len(self.now(*states)) == count, lambda: (count, states, self.changes, self.problems))
        return self.now(*states)

    async def pods(self) -> dict[str, Pod]:
        """The pods that the API server has."""
        namespace = self.owner.metadata.namespace
        listing = await self.client.resource(PODS).list(namespace, label_selector=f"rlhfless.io/job={self.name}")
        return {pod.metadata.name: pod for pod in listing.items}

    @property
    def name(self) -> str:
        return self.owner.metadata.name

    async def run(self, part: str, stage: Stage = "generation") -> list[Event]:
        """A task to its end; what `part` may say is in `fake_function`."""
        async with aclosing(self.platform.run(request(part, stage))) as events:
            return [event async for event in events]

    async def instance_of(self, part: str, stage: Stage = "generation") -> str:
        """The instance that did a task."""
        return next(event.instance for event in await self.run(part, stage) if isinstance(event, Started))

    @asynccontextmanager
    async def running(self, part: str, stage: Stage = "generation") -> AsyncIterator[tuple[str, Any]]:
        """A task that has begun: its instance, and its further events. It is cut at the end."""
        events = self.platform.run(request(part, stage))
        async with aclosing(events):
            first = await anext(events)
            assert isinstance(first, Started)
            yield first.instance, events


def request(part: str, stage: Stage = "generation") -> ExportRequest:
    return export_request(part, stage=stage, result="/dev/null/result.json", heartbeat_seconds=0.5)


@asynccontextmanager
async def job_under_test(
    client: KnativeClient,
    owner: KubernetesObject,
    settings: ClusterSettings,
    *,
    root: str,
    stages: Sequence[Stage] = ("generation",),
    pods: PodsSpec | None = None,
    keep_alive: float = 0.0,
    stall_seconds: float = 60.0,
    watch: PodWatch | None = None,
    environment: EnvironmentFunction | None = None,
    slots: Slots | None = None,
    places: NodePlaces | None = None,
) -> AsyncIterator[JobUnderTest]:
    """An open platform; at the end it is closed."""
    async with contextlib.AsyncExitStack() as stack:
        if watch is None:
            watch = await stack.enter_async_context(PodWatch(client, [owner.metadata.namespace]))
        metadata = owner.metadata
        api_version, kind = "v1", "ConfigMap"
        identity = JobIdentity(metadata.namespace, metadata.name, metadata.uid, api_version, kind)
        changes: list[StateChange] = []
        problems: list[str] = []
        platform = KnativePlatform(
            client,
            watch,
            job=identity,
            functions={
                stage: StageFunction(
                    identity,
                    stage,
                    pods or PodsSpec(),
                    root,
                    slots=SlotsWanted("default", slots.largest, "nvidia.com/gpu") if slots else None,
                )
                for stage in stages
            },
            slots=slots.share_of(identity) if slots else None,
            settings=settings,
            keep_alive=dict.fromkeys(stages, keep_alive),
            stall_seconds=stall_seconds,
            on_state=changes.append,
            on_problem=problems.append,
            places=places,
            environment=environment,
        )
        await platform.open()
        try:
            yield JobUnderTest(client, watch, owner, platform, changes, problems)
        finally:
            await platform.close()
