"""The slots of the operator's jobs that use GPUs in turns."""

from collections.abc import Mapping

from rlhfless_functions.api import Stage
from rlhfless_operator.controller.sharing import pool_of
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import SlotsWanted
from rlhfless_operator.platforms.room import gpus_by_stage, room_in_pool
from rlhfless_operator.platforms.turns.slot_division import PoolDivision
from rlhfless_operator.platforms.turns.slot_pool import SlotPool, SlotShare


def slots_wanted(job: RLHFJob, settings: ClusterSettings) -> Mapping[Stage, SlotsWanted]:
    """The slots that each stage's pods use in turns; empty if the job's pool has no DeviceClass, or if the pods request
    no GPU."""
    name, pool = pool_of(job), settings.pools.get(pool_of(job))
    if pool is None or pool.device_class is None:
        return {}
    gpus = gpus_by_stage(job, settings.pods, pool)
    return {stage: SlotsWanted(name, count, pool.resource) for stage, count in gpus.items() if count}


class SlotPools:
    """The slots of all namespaces.

    Args:
        client: client of the cluster.
        settings: the operator's settings.
    """

    def __init__(self, client: KnativeClient, settings: ClusterSettings) -> None:
        self._client = client
        self._settings = settings
        self._pools: dict[tuple[str, str], SlotPool] = {}
        self._divisions: dict[str, PoolDivision] = {}

    def share_of(self, job: RLHFJob, namespace: str) -> SlotShare | None:
        """A job's share in the slots of its namespace; None if the job uses none."""
        wanted = slots_wanted(job, self._settings)
        if not wanted:
            return None
        name = pool_of(job)
        settings = self._settings.pools[name]
        key = (namespace, name)
        if key not in self._pools:
            if name not in self._divisions:
                self._divisions[name] = PoolDivision(self._client, name, settings, self._settings.namespaces)
            self._pools[key] = SlotPool(namespace, name, settings, self._divisions[name])
        actors = job.spec.generation.instances.max or room_in_pool(job, self._settings, namespace) or 1
        instances: Mapping[Stage, int] = {
            "generation": max(actors, job.spec.generation.instances.min),
            "preparation": job.spec.preparation.instances.max,
        }
        at_once = max(each.gpus * instances.get(stage, 1) for stage, each in wanted.items())
        largest = max(each.gpus for each in wanted.values())
        return SlotShare(self._pools[key], at_once, largest, job.spec.priority)
