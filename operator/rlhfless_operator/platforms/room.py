"""The number of generation instances that fit on a cluster: pure functions of the pool and the namespace's quotas."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhfless_functions.api import Stage
from rlhfless_operator.job.instance_gpus import gpus_of, pods_by_stage
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.quantities import quantity
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings

DEFAULT_POOL = "default"
"""The pool of a job that does not name one."""


def pool_of(job: RLHFJob) -> str:
    """Return the name of a job's pool."""
    return job.spec.pool or DEFAULT_POOL


def gpus_by_stage(job: RLHFJob, defaults: PodsSpec, pool: PoolSettings) -> dict[Stage, int]:
    """Count the GPUs of a pool that an instance of each stage has, with the cluster's default pods."""
    pods = pods_by_stage(job.on_cluster(defaults).spec)
    return {stage: gpus_of(each, pool.resource) for stage, each in pods.items()}


def room_in_pool(job: RLHFJob, settings: ClusterSettings, namespace: str) -> int | None:
    """Return the number of generation instances that fit into the job's pool, or into the namespace's part of it.

    The stages of a synchronous job take turns in a pool, so generation may use all of it. In an asynchronous job the
    other stages work at the same time, and generation leaves room for them.

    Returns:
        None if there is no such pool, or if generation requests none of its GPUs.
    """
    pool = settings.pools.get(pool_of(job))
    if pool is None:
        return None
    gpus = gpus_by_stage(job, settings.pods, pool)
    if not gpus["generation"]:
        return None
    room = min(pool.gpus, pool.share_of(namespace))
    if job.spec.asynchronous is not None:
        room -= _gpus_beside_generation(job, gpus)
    return max(0, room) // gpus["generation"]


def why_not_in_pool(job: RLHFJob, settings: ClusterSettings, namespace: str) -> str | None:
    """Return the reason why a job can't run in its pool, with the remedy; None if it can, or if there is no such pool.

    Its preparation instances may have no room there, or it is asynchronous and can't generate while it learns.
    """
    name = pool_of(job)
    pool = settings.pools.get(name)
    if pool is None:
        return None
    gpus, preparers = gpus_by_stage(job, settings.pods, pool), job.spec.preparation.instances.set_aside
    room = min(pool.gpus, pool.share_of(namespace))
    if job.spec.asynchronous is not None:
        return _why_not_ahead(job, name, pool, room, gpus["generation"], _gpus_beside_generation(job, gpus))
    return too_many("preparation", preparers, gpus["preparation"], room, name) if preparers > 1 else None


def too_many(stage: Stage, instances: int, gpus: int, room: int, pool: str) -> str | None:
    """Return the reason why the most instances of a stage don't fit, with the remedy; None if they do.

    Args:
        gpus: GPUs of an instance.
        room: GPUs that the job may have of the pool.
    """
    if instances * gpus <= room:
        return None
    return (
        f"spec.{stage}.instances.max is {instances}, with {gpus} GPUs each, and the job may have {room} of pool"
        f" {pool}: set it to {max(1, room // gpus)}, or name another pool"
    )


def _why_not_ahead(job: RLHFJob, name: str, pool: PoolSettings, room: int, generating: int, beside: int) -> str | None:
    if pool.device_class is not None and (generating or beside):
        return (
            f"spec.async generates while it learns, and pods of pool {name} use GPUs in turns: one stage would wait for"
            " the other. Remove async, or name a pool without a deviceClass"
        )
    needed = generating * job.spec.generation.instances.min + beside
    if needed > room:
        return (
            f"spec.async generates while it learns, which takes {needed} GPUs at once, and the job may have {room} of"
            f" pool {name}: remove async, ask for fewer GPUs a pod, lower generation.instances.min,"
            " preparation.instances.max or learning.instances.max, or name another pool"
        )
    return None


def _gpus_beside_generation(job: RLHFJob, gpus: Mapping[Stage, int]) -> int:
    """Return the GPUs of a pool that the stages after generation use at once."""
    spec = job.spec
    return gpus["preparation"] * spec.preparation.instances.set_aside + gpus["learning"] * spec.learning.instances.max


def room_in_quotas(job: RLHFJob, settings: ClusterSettings, quotas: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of generation instances that a namespace's quotas allow beside the other stages; at least one.

    The use of other jobs does not count, because it changes while a job keeps its number.

    Args:
        quotas: ResourceQuota objects.

    Returns:
        None if no quota limits an extended resource, such as `nvidia.com/gpu`, that generation requests.
    """
    found = []
    for resource, amount in _extended_of_generation(job, settings.pods).items():
        beside = _beside_generation(job, settings.pods, resource)
        found += [max(1, int((hard - beside) // amount)) for _, hard in _limited(quotas, resource)]
    return min(found, default=None)


def why_not_in_quotas(job: RLHFJob, settings: ClusterSettings, quotas: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the reason why quotas keep an asynchronous job from generating while it learns, with the remedy.

    None if they don't, and for a synchronous job.

    Args:
        quotas: ResourceQuota objects.
    """
    if job.spec.asynchronous is None:
        return None
    for resource, amount in _extended_of_generation(job, settings.pods).items():
        needed = amount * job.spec.generation.instances.min + _beside_generation(job, settings.pods, resource)
        for name, hard in _limited(quotas, resource):
            if needed > hard:
                return (
                    f"spec.async generates while it learns, which takes {needed:g} {resource} at once, and quota {name}"
                    f" of the namespace allows {hard:g}: remove async, ask for fewer a pod, lower"
                    " generation.instances.min, preparation.instances.max or learning.instances.max, or raise the"
                    " quota"
                )
    return None


def _extended_of_generation(job: RLHFJob, defaults: PodsSpec) -> dict[str, float]:
    """Return the extended resources, such as `nvidia.com/gpu`, that a generation instance requests."""
    limits = _limits(pods_by_stage(job.on_cluster(defaults).spec)["generation"])
    return {resource: quantity(text) for resource, text in limits.items() if "/" in resource and quantity(text)}


def _beside_generation(job: RLHFJob, defaults: PodsSpec, resource: str) -> float:
    """Return the resources that the stages after generation request at once."""
    stages, spec = pods_by_stage(job.on_cluster(defaults).spec), job.spec

    def asked(stage: Stage, instances: int) -> float:
        return instances * quantity(_limits(stages[stage]).get(resource, "0"))

    return asked("preparation", spec.preparation.instances.set_aside) + asked("learning", spec.learning.instances.max)


def _limited(quotas: Sequence[Mapping[str, Any]], resource: str) -> Iterator[tuple[str, float]]:
    """Yield each quota that limits a resource: its name, and its limit."""
    for quota in quotas:
        hard = quota.get("spec", {}).get("hard", {}).get(f"requests.{resource}")
        if hard is not None:
            yield quota.get("metadata", {}).get("name", ""), quantity(hard)


def _limits(pods: PodsSpec) -> Mapping[str, str]:
    return (pods.resources.limits if pods.resources else None) or {}
