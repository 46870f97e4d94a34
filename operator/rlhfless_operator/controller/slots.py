"""The slots of the operator's jobs that use GPUs in turns."""

from collections.abc import Mapping

from rlhfless_functions.api import Stage
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import SlotsWanted
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.platforms.turns.slot_division import PoolDivision
from rlhfless_operator.platforms.turns.slot_pool import SlotPool, SlotShare


def slots_wanted(member: PoolMember, settings: ClusterSettings) -> Mapping[Stage, SlotsWanted]:
    """Return the slots that each stage's pods use in turns; empty for a job whose pods don't sleep."""
    if not member.sleeps:
        return {}
    resource = settings.pools[member.pool].resource
    return {stage: SlotsWanted(member.pool, count, resource) for stage, count in member.gpus.items() if count}


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
        if not member.sleeps:
            return None
        name, key = member.pool, (member.namespace, member.pool)
        if key not in self._pools:
            settings = self._settings.pools[name]
            if name not in self._divisions:
                self._divisions[name] = PoolDivision(self._client, name, settings, self._settings.namespaces)
            self._pools[key] = SlotPool(member.namespace, name, settings, self._divisions[name], member.jobs)
        return SlotShare(self._pools[key], member)
