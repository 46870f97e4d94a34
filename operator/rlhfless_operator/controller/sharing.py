"""The pools of GPUs that the jobs of an operator share."""

from collections.abc import AsyncGenerator

from rlhfless_functions.api import Event, RunRequest, Stage
from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.conditions import Reason
from rlhfless_operator.controller.context import ClusterPlatform, MakePlatform, Tell
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.pools.sharing import Pool
from rlhfless_operator.planner.pools.whole_gpus import SwitchCost
from rlhfless_operator.platforms.base import Platform, PlatformUnavailableError, Preload, StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.room import DEFAULT_POOL, gpus_by_stage, room_in_pool, why_not_in_pool
from rlhfless_operator.platforms.shared import GpuPool, PooledJob, SharedPlatform, SwitchCosts, Waiting


def sharing(make_platform: MakePlatform, settings: ClusterSettings) -> MakePlatform:
    """Wrap the platforms, and put every job in its pool. Without configured pools, return them unchanged."""
    if not settings.pools:
        return make_platform
    pools = {name: GpuPool(Pool(gpus=pool.gpus, namespaces=pool.namespaces)) for name, pool in settings.pools.items()}

    def make(resource: JobResource, job: RLHFJob, root: str, on_state: StateListener, tell: Tell) -> ClusterPlatform:
        name = pool_of(job)
        inner = make_platform(resource, _keeping_nothing(job), root, on_state, tell)
        return PooledPlatform(inner, resource, job, settings, name, pools.get(name), tell)

    return make


def pool_of(job: RLHFJob) -> str:
    """Name of a job's pool."""
    return job.spec.pool or DEFAULT_POOL


def takes_turns(job: RLHFJob, settings: ClusterSettings) -> bool:
    """Whether a job's pods use GPUs in turns, and sleep between their tasks."""
    pool = settings.pools.get(pool_of(job))
    return pool is not None and pool.device_class is not None and any(gpus_by_stage(job, settings.pods, pool).values())


class PooledPlatform:
    """A job's platform in its pool. It joins the pool when it opens and leaves it when it closes.

    If its pods take turns, the slots of its namespace are its part of the pool and decide whose turn it is.
    """

    def __init__(
        self,
        platform: ClusterPlatform,
        resource: JobResource,
        job: RLHFJob,
        settings: ClusterSettings,
        name: str,
        pool: GpuPool | None,
        tell: Tell,
    ) -> None:
        self._platform = platform
        self._resource = resource
        self._job = job
        self._settings = settings
        self._name = name
        self._pool = pool
        self._tell = tell
        self._shared: SharedPlatform | None = None
        self.costs: SwitchCosts = lambda stage: SwitchCost()
        """What it costs the job to release an instance of a stage and to start another; empty until it is known."""

    async def open(self) -> None:
        """Join the pool.

        Raises:
            PlatformUnavailableError: there is no such pool, or the job can never run in it.
        """
        if self._pool is None:
            known = ", ".join(self._settings.pools)
            raise PlatformUnavailableError(
                f"spec.pool: the operator has no pool {self._name!r}; name one of {known}, or add it in the chart"
            )
        self._check_learners()
        refusal = why_not_in_pool(self._job, self._settings, self._resource.namespace)
        if refusal is not None:
            raise PlatformUnavailableError(refusal)
        await self._platform.open()
        if takes_turns(self._job, self._settings):
            return
        spec, generation = self._job.spec, self._job.spec.generation.instances
        actors = generation.max or room_in_pool(self._job, self._settings, self._resource.namespace) or 1
        pooled = PooledJob(
            self._resource.uid,
            self._resource.namespace,
            gpus_by_stage(self._job, self._settings.pods, self._settings.pools[self._name]),
            name=self._resource.name,
            priority=spec.priority,
            instances={
                "generation": max(actors, generation.min),
                "preparation": spec.preparation.instances.max,
                "learning": spec.learning.instances.max,
            },
            together=["learning"] if spec.learning.instances.max > 1 else [],
            keep_alive=spec.keep_alive_seconds(),
            costs=lambda stage: self.costs(stage),
            on_wait=self._waits,
        )
        try:
            self._shared = self._pool.join(self._platform, pooled)
        except ValueError as error:
            raise PlatformUnavailableError(f"pool {self._name}: {error}") from error

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """As the pool allows."""
        await self._joined.hold(stage, count, preload)

    def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """As the pool allows."""
        return self._joined.run(request)

    async def close(self) -> None:
        """Leave the pool."""
        await self._joined.close()

    async def remove(self) -> None:
        """As the platform does."""
        await self._platform.remove()

    def _waits(self, waiting: Waiting | None) -> None:
        if waiting is None:
            self._tell(conditions.PROGRESSING, True, Reason.TRAINING, "has its turn")
        else:
            message = waiting.message(self._name, self._resource.namespace)
            self._tell(conditions.PROGRESSING, False, Reason.WAITING_FOR_TURN, message)

    def _check_learners(self) -> None:
        learners, pool = self._job.spec.learning.instances.max, self._settings.pools[self._name]
        gpus = gpus_by_stage(self._job, self._settings.pods, pool)["learning"]
        if learners == 1 or not gpus:
            return
        if pool.device_class is not None:
            raise PlatformUnavailableError(
                f"spec.learning.instances.max is {learners}, and pods of pool {self._name} use GPUs in turns: instances"
                " that learn together would wait for each other's turns. Set it to 1 and give the learning pods more"
                " GPUs, or name a pool without a deviceClass"
            )
        room = min(pool.gpus, pool.share_of(self._resource.namespace))
        if learners * gpus > room:
            raise PlatformUnavailableError(
                f"spec.learning.instances.max is {learners}, with {gpus} GPUs each, and the job may have {room} of pool"
                f" {self._name}: set it to {max(1, room // gpus)}, or name another pool"
            )

    @property
    def _joined(self) -> Platform:
        return self._shared or self._platform


def _keeping_nothing(job: RLHFJob) -> RLHFJob:
    """The job without a keep-alive of its own, because the pool decides which instances stay."""
    spec = job.spec
    changes = {
        name: stage.model_copy(update={"keep_alive": 0.0})
        for name, stage in (
            ("generation", spec.generation),
            ("preparation", spec.preparation),
            ("learning", spec.learning),
        )
    }
    return job.model_copy(update={"spec": spec.model_copy(update=changes)})
