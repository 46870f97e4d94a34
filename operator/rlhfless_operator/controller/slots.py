"""The slots of the operator's jobs that use GPUs in turns."""

from collections.abc import Mapping

from rlhfless_functions.api import Stage
from rlhfless_operator.controller.pools import pool_of
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import SlotsWanted
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.platforms.room import gpus_by_stage
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

    def share_of(self, member: PoolMember) -> SlotShare | None:
        """Return a job's share in the slots of its namespace; None if the job uses none."""
        settings = self._settings.pools.get(member.pool)
        if settings is None or settings.device_class is None or not any(member.gpus.values()):
            return None
        name, key = member.pool, (member.namespace, member.pool)
        if key not in self._pools:
            if name not in self._divisions:
                self._divisions[name] = PoolDivision(self._client, name, settings, self._settings.namespaces)
            self._pools[key] = SlotPool(member.namespace, name, settings, self._divisions[name], member.jobs)
        return SlotShare(self._pools[key], member)
