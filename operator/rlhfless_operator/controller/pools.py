"""The pools of GPUs that the jobs of an operator share."""

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.conditions import Reason, Tell
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.job.actor_range import ActorRange, preparer_range
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.pools.contention import ALONE, Contention, contention
from rlhfless_operator.planner.pools.sharing import Pool
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.job_platform import ClusterPlatform, Hook
from rlhfless_operator.platforms.pool_member import Clock, PoolMember
from rlhfless_operator.platforms.room import gpus_by_stage, pool_of, room_in_pool, too_many, why_not_in_pool
from rlhfless_operator.platforms.turns.whole_gpus import WaitingJob, WholeGpuPool, WholeGpus


class Pools:
    """All pools, and the jobs in them.

    Args:
        settings: the operator's settings, with the pools.
        clock: monotonic seconds.
    """

    def __init__(self, settings: ClusterSettings, clock: Clock = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._jobs: dict[str, list[PoolMember]] = defaultdict(list)
        self._pools = {
            name: WholeGpuPool(Pool(gpus=pool.gpus, namespaces=pool.namespaces), self._jobs[name], clock)
            for name, pool in settings.pools.items()
        }

    @contextmanager
    def joined(self, job: RLHFJob, resource: JobResource) -> Iterator[PoolMember]:
        """Make a job a member of its pool, as long as the context lasts."""
        spec, name = job.spec, pool_of(job)
        pool, generation = self._settings.pools.get(name), spec.generation.instances
        gpus = {} if pool is None else gpus_by_stage(job, self._settings.pods, pool)
        most = max(generation.max or room_in_pool(job, self._settings, resource.namespace) or 1, generation.min)
        actors = ActorRange(generation.min, most)
        member = PoolMember(
            resource.uid,
            resource.namespace,
            resource.name,
            gpus,
            name,
            self._jobs[name],
            priority=spec.priority,
            instances={
                "generation": actors.most,
                "preparation": preparer_range(spec, actors, gpus, queued=resource.queue is not None).most,
                "learning": spec.learning.instances.max,
            },
            together=["learning"] if spec.learning.instances.max > 1 else [],
            keep_alive=spec.keep_alive_seconds(),
            platform_keep_alive={} if self._settings.pools else spec.keep_alive_seconds(),
            sleeps=pool is not None and pool.device_class is not None and any(gpus.values()),
            clock=self._clock,
        )
        with member.joined():
            yield member

    def contention(self, member: PoolMember) -> Contention:
        """Return what other jobs leave of its pool, or of its namespace's quota in the pool if that is less."""
        pool = self._settings.pools.get(member.pool)
        if pool is None:
            return ALONE
        now = self._clock()
        others = [each for each in member.jobs if each is not member and any(each.gpus.values())]
        near = [each for each in others if each.namespace == member.namespace]
        parts = ((others, pool.gpus), (near, pool.share_of(member.namespace)))
        per_actor = member.gpus["generation"]
        left = [contention([each.demand for each in jobs], gpus, per_actor, now) for jobs, gpus in parts]
        actors = [each.actors for each in left if each.actors is not None]
        return Contention(max(each.wanted for each in left), min(actors, default=None))

    def hooks(self, member: PoolMember, job: RLHFJob, tell: Tell) -> list[Hook]:
        """Return the hooks of a job's platform. If the job's pods sleep, their slots are its part of the pool.

        Args:
            tell: sets conditions of the job.
        """

        def waits(waiting: WaitingJob | None) -> None:
            if waiting is None:
                tell(conditions.PROGRESSING, True, Reason.TRAINING, "has its turn")
            else:
                message = waiting.message(member.pool, member.namespace)
                tell(conditions.PROGRESSING, False, Reason.WAITING_FOR_TURN, message)

        if not self._settings.pools:
            return []
        refusal, pool = Refusal(member, job, self._settings), self._pools.get(member.pool)
        if pool is None or member.sleeps:
            return [refusal]
        return [refusal, WholeGpus(pool, member, on_wait=waits)]


class Refusal(Hook):
    """Refuses to open the platform of a job that can never run in its pool."""

    def __init__(self, member: PoolMember, job: RLHFJob, settings: ClusterSettings) -> None:
        self._reason = _unknown_pool(member, settings) or _too_many_learners(member, settings)
        self._reason = self._reason or why_not_in_pool(job, settings, member.namespace)

    @asynccontextmanager
    async def opening(self, platform: ClusterPlatform) -> AsyncIterator[None]:
        """Raise the reason.

        Raises:
            PlatformUnavailableError: there is no such pool, or the job can never run in it.
        """
        if self._reason is not None:
            raise PlatformUnavailableError(self._reason)
        yield


def _unknown_pool(member: PoolMember, settings: ClusterSettings) -> str | None:
    if member.pool in settings.pools:
        return None
    known = ", ".join(settings.pools)
    return f"spec.pool: the operator has no pool {member.pool!r}; name one of {known}, or add it in the chart"


def _too_many_learners(member: PoolMember, settings: ClusterSettings) -> str | None:
    learners, gpus, pool = member.instances["learning"], member.gpus["learning"], settings.pools[member.pool]
    if learners == 1 or not gpus:
        return None
    if member.sleeps:
        return (
            f"spec.learning.instances.max is {learners}, and pods of pool {member.pool} use GPUs in turns: instances"
            " that learn together would wait for each other's turns. Set it to 1 and give the learning pods more"
            " GPUs, or name a pool without a deviceClass"
        )
    return too_many("learning", learners, gpus, min(pool.gpus, pool.share_of(member.namespace)), member.pool)
