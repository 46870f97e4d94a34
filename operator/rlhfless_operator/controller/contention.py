"""The jobs that share a pool, and how many of its GPUs each wants."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from rlhfless_functions.api import Event, RunRequest, Stage
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.pools.contention import ALONE, Contention, Demand, contention
from rlhfless_operator.platforms.base import Platform, Preload
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.room import DEFAULT_POOL, gpus_by_stage


@dataclass(eq=False)
class PoolMember:
    """A job with a running driver.

    Args:
        clock: monotonic seconds.
    """

    pool: str
    namespace: str
    gpus: dict[Stage, int]
    """GPUs of an instance of each stage."""
    clock: Callable[[], float]
    demand: Demand = field(init=False)

    def __post_init__(self) -> None:
        self.demand = Demand(self.clock())

    @contextmanager
    def wanting(self, stage: Stage) -> Iterator[None]:
        """Count a task of a stage that uses or waits for GPUs, as long as the context lasts."""
        gpus = self.gpus.get(stage, 0)
        self.demand.change(gpus, self.clock())
        try:
            yield
        finally:
            self.demand.change(-gpus, self.clock())


class PoolMembers:
    """The jobs of all pools.

    Args:
        settings: the operator's settings, with the pools.
        clock: monotonic seconds.
    """

    def __init__(self, settings: ClusterSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._members: dict[str, list[PoolMember]] = {name: [] for name in settings.pools}

    @contextmanager
    def joined(self, job: RLHFJob, namespace: str) -> Iterator[PoolMember]:
        """Make a job a member of its pool, as long as the context lasts."""
        name = job.spec.pool or DEFAULT_POOL
        pool = self._settings.pools.get(name)
        gpus = {} if pool is None else gpus_by_stage(job, self._settings.pods, pool)
        member = PoolMember(name, namespace, gpus, self._clock)
        members = self._members.get(name, []) if any(gpus.values()) else []
        members.append(member)
        try:
            yield member
        finally:
            members.remove(member)

    def contention(self, member: PoolMember) -> Contention:
        """What other jobs leave of its pool, or of its namespace's quota in the pool, if that is less."""
        pool = self._settings.pools.get(member.pool)
        if pool is None:
            return ALONE
        now = self._clock()
        others = [each for each in self._members[member.pool] if each is not member]
        near = [each for each in others if each.namespace == member.namespace]
        parts = ((others, pool.gpus), (near, pool.share_of(member.namespace)))
        per_actor = member.gpus["generation"]
        left = [contention([each.demand for each in jobs], gpus, per_actor, now) for jobs, gpus in parts]
        actors = [each.actors for each in left if each.actors is not None]
        return Contention(max(each.wanted for each in left), min(actors, default=None))


class WantingPlatform:
    """Forwards everything to another platform, and counts the job's tasks in its pool."""

    def __init__(self, platform: Platform, member: PoolMember) -> None:
        self._platform = platform
        self._member = member

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """As the platform does."""
        await self._platform.hold(stage, count, preload)

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """As the platform does."""
        with self._member.wanting(request.key.stage):
            async with aclosing(self._platform.run(request)) as events:
                async for event in events:
                    yield event

    async def close(self) -> None:
        """As the platform does."""
        await self._platform.close()
