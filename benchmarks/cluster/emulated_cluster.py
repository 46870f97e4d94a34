"""A cluster with an operator on this machine: a real API server, Knative emulated, and pods that rehearse."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.slot_timeline import Timeline
from benchmarks.shared.rehearsed_jobs import job_of_scenario, write_trace_of
from rlhfless_operator.controller.conditions import Tell
from rlhfless_operator.controller.context import MakePlatform
from rlhfless_operator.controller.functions import knative_platforms
from rlhfless_operator.controller.main import OpenPlatforms, Operator
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.base import StateChange, StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.platforms.pods.manifests import SLOTS
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.simulator.scenarios import find_scenario
from tests.clusters.control_plane import ApiServer
from tests.clusters.knative_definitions import api_client, install
from tests.clusters.knative_emulation import KnativeEmulation
from tests.clusters.rehearsing_functions import rehearsing_functions
from tests.clusters.slot_webhook import giving_slots
from tests.controller.operator_harness import Jobs, fresh_namespace

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Setting:
    """The jobs and the GPUs that all runs of a benchmark have in common."""

    scenario: str
    slots: int
    learner_gpus: int
    """GPUs of a learner, and of a group of slots."""
    steps: int
    startup: float
    """Emulated seconds in which a pod starts."""
    time_scale: float
    prompts: int | None = None
    """Prompts of a step; the scenario's if left out."""

    def part(self, jobs: int) -> "Setting":
        """Return the setting of one job, where each of so many has slots of its own."""
        slots = self.slots // jobs
        return replace(self, slots=slots, learner_gpus=min(self.learner_gpus, slots))

    def pool(self) -> PoolSettings:
        """Return a pool of the slots."""
        return PoolSettings(gpus=self.slots, device_class="gpu.rehearsal", gpus_per_group=self.learner_gpus)


def job_of(number: int, setting: Setting, folder: Path, pool: str, name: str) -> dict[str, Any]:
    """Return the document of a job whose lengths are drawn with its number as the seed."""
    scenario = find_scenario(setting.scenario)
    scenario = replace(scenario, prompts_per_step=setting.prompts or scenario.prompts_per_step)
    trace = folder / f"trace-{number}.parquet"
    if not trace.exists():
        write_trace_of(scenario, setting.steps, trace, seed=number)
    document = job_of_scenario(
        scenario,
        name,
        trace,
        steps=setting.steps,
        learner_gpus=setting.learner_gpus,
        startup_seconds=setting.startup,
        time_scale=setting.time_scale,
    )
    document["spec"]["pool"] = pool
    return document


@asynccontextmanager
async def emulated_cluster(
    server: ApiServer,
    folder: Path,
    pools: Mapping[str, PoolSettings],
    timeline: Timeline,
    *,
    drain: float | None = None,
) -> AsyncIterator[Jobs]:
    """Make a namespace whose jobs an operator runs, on pods that rehearse.

    Args:
        server: the API server.
        folder: for the jobs and a log.
        pools: of the cluster; with `drain` one alone, `default`.
        timeline: told of every change of a pod's state, and of the slots that it is placed on.
        drain: seconds from a pod's deletion until its GPU is free. Where the pool has no slots, the cluster never has
            more pods than the pool has GPUs.
    """
    slotted = all(pool.device_class is not None for pool in pools.values())
    options: dict[str, Any] = {} if drain is None else {"terminating_seconds": 0.0, "lingering_seconds": drain}
    if not slotted:
        options["room"] = pools["default"].gpus
    async with api_client(server) as api, rehearsing_functions(folder / "functions.log") as launch:
        client = KnativeClient(api, field_manager="knative")
        await install(client)
        give = giving_slots(client)

        async def admit(pod: dict[str, Any], namespace: str) -> dict[str, Any]:
            name = pod["metadata"]["name"]
            if not slotted:
                timeline.placed(name, [name])
                return pod
            admitted = await give(pod, namespace)
            timeline.placed(name, admitted["metadata"]["annotations"][SLOTS].split(","))
            return admitted

        async with KnativeEmulation(client, launch=launch, admit=admit, **options) as knative:
            settings = _Settings(
                functions_image="none",
                artifacts=str(folder / uuid.uuid4().hex[:6]),
                ingress=knative.url,
                pools=dict(pools),
                metrics_port=0,
                liveness_port=0,
                drain=drain,
            )
            stop = asyncio.Event()
            operating = asyncio.create_task(Operator(settings, _observed(timeline)).run(stop))
            try:
                with fresh_namespace(server) as jobs:
                    yield jobs
            finally:
                stop.set()
                await operating


async def wait_for_ends(jobs: Jobs, names: Sequence[str]) -> dict[str, float]:
    """Wait until these jobs have succeeded, and return when each did.

    Raises:
        SystemExit: if one fails.
    """
    ends: dict[str, float] = {}
    while len(ends) < len(names):
        for name in [name for name in names if name not in ends]:
            status = await asyncio.to_thread(jobs.status, name)
            if status.get("phase") == "Failed":
                raise SystemExit(f"{name} failed: {status}")
            if status.get("phase") == "Succeeded":
                ends[name] = time.monotonic()
        await asyncio.sleep(_POLL_SECONDS)
    return ends


class _Settings(ClusterSettings):
    """Settings of a cluster whose pods go in emulated time."""

    drain: float | None

    @property
    def draining_seconds(self) -> float:
        """Seconds here."""
        return super().draining_seconds if self.drain is None else self.drain


def _observed(timeline: Timeline) -> OpenPlatforms:
    """Return the operator's own platforms, of which the timeline is told every change of a pod's state."""

    @asynccontextmanager
    async def open_platforms(api: Any, settings: ClusterSettings) -> AsyncIterator[MakePlatform]:
        async with knative_platforms(api, settings) as make_platform:

            def make(member: PoolMember, job: RLHFJob, root: str, on_state: StateListener, tell: Tell) -> Any:
                def both(change: StateChange) -> None:
                    timeline.observe(member.name, change)
                    on_state(change)

                return make_platform(member, job, root, both, tell)

            yield make

    return open_platforms
