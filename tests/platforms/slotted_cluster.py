"""A namespace of an emulated cluster with slots, for the tests of pods that use GPUs in turns.

The pods themselves note when they wake and sleep: what is said of turns is what they say.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.controller.cluster_report import PodsReport
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.platforms.turns.slot_claims import CLAIMS, ResourceClaim
from rlhfless_operator.platforms.turns.slot_division import PoolDivision
from rlhfless_operator.platforms.turns.slot_pool import SlotPool
from tests.clusters.control_plane import ApiServer
from tests.clusters.slot_webhook import giving_slots
from tests.platforms.emulated_cluster import EmulatedCluster, open_cluster
from tests.platforms.knative_jobs import JobUnderTest, Slots


class SlottedCluster(EmulatedCluster):
    """A namespace with slots, whose webhook is asked about every pod."""

    def slots(self, gpus: int = 1, *, together: int = 1, largest: int = 1, **namespaces: int) -> Slots:
        settings = PoolSettings(gpus=gpus, device_class="gpu.test", gpus_per_group=together, namespaces=namespaces)
        division = PoolDivision(self.client, "default", settings, [self.namespace])
        jobs: list[PoolMember] = []
        return Slots(SlotPool(self.namespace, "default", settings, division, jobs), jobs, gpus, largest)

    async def claims(self) -> dict[str, ResourceClaim]:
        return {each.metadata.name: each for each in (await self.client.resource(CLAIMS).list(self.namespace)).items}

    def awake(self) -> list[str]:
        """The pods that have a GPU's memory now."""
        return [
            pod.name for pod in self.knative.pods if pod.running and pod.running.function and pod.running.function.awake
        ]

    def most_awake(self, pods: Sequence[str]) -> int:
        """The most of some pods that ever were awake at the same time, as they say themselves."""
        told = sorted(
            (at, name, what)
            for name in pods
            if (running := self.knative.pod(name).running) and running.function
            for at, what in running.function.told
        )
        awake: set[str] = set()
        most = 0
        for _, name, what in told:
            (awake.add if what == "awake" else awake.discard)(name)
            most = max(most, len(awake))
        return most


@asynccontextmanager
async def slotted(server: ApiServer, folder: Path, **options: Any) -> AsyncIterator[SlottedCluster]:
    async with open_cluster(server, folder, **options) as made:
        cluster = SlottedCluster(made.client, made.knative, made.folder, made.namespace)
        made.knative.admit = giving_slots(cluster.client)
        yield cluster


@pytest.fixture
async def cluster(server: ApiServer, tmp_path: Path) -> AsyncIterator[SlottedCluster]:
    async with slotted(server, tmp_path) as made:
        yield made


def told(job: JobUnderTest) -> str:
    """What a user reads in the job's condition PodsHealthy, after all that was told."""
    said = [""]
    report = PodsReport(lambda kind, true, reason, message: said.append(message))
    for problem in job.problems:
        report.trouble(problem)
    return said[-1]
