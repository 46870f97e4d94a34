"""The platforms of the operator's jobs: Knative Services, watched by one watch."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from kubernetes.aio.client import ApiClient

from rlhfless_functions.api import Stage
from rlhfless_operator.controller.cluster_report import PodsReport, Preflight
from rlhfless_operator.controller.conditions import Tell
from rlhfless_operator.controller.context import MakePlatform
from rlhfless_operator.controller.environments import environment_of, gateways_of, shelter_of
from rlhfless_operator.controller.slots import SlotPools, slots_wanted
from rlhfless_operator.job.instance_gpus import pods_by_stage
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.planner.pools.placement import TOPOLOGY_KEYS
from rlhfless_operator.platforms.base import StateChange, StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.knative import KnativePlatform
from rlhfless_operator.platforms.pods.egress import addresses_of
from rlhfless_operator.platforms.pods.manifests import JobIdentity, StageFunction, service
from rlhfless_operator.platforms.pods.node_places import NodePlaces
from rlhfless_operator.platforms.pods.pod_watch import PodWatch
from rlhfless_operator.platforms.pods.store_mounts import check_store_mounts
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.preflight import ClusterLook, Finding, stages_of

FIELD_MANAGER = "rlhfless"


@asynccontextmanager
async def knative_platforms(api: ApiClient, settings: ClusterSettings) -> AsyncIterator[MakePlatform]:
    """Yield the factory of jobs' platforms, valid as long as the context lasts.

    Args:
        api: client of the cluster; the caller closes it.
    """
    client = KnativeClient(api, field_manager=FIELD_MANAGER)
    look = ClusterLook(api, settings)
    pools = SlotPools(client, settings)
    # A role in some namespaces can't allow listing nodes.
    places = NodePlaces(client, settings.topology_keys or TOPOLOGY_KEYS, allowed=not settings.namespaces)
    async with PodWatch(client, settings.namespaces) as watch:

        def make(member: PoolMember, job: RLHFJob, root: str, on_state: StateListener, tell: Tell) -> JobPlatform:
            identity = JobIdentity(member.namespace, member.name, member.uid, API_VERSION, KIND)
            report = PodsReport(tell)

            def both(change: StateChange) -> None:
                on_state(change)
                report.changed(change)

            async def look_around() -> list[Finding]:
                # A role in some namespaces can't allow listing nodes and devices, or reading the CRD.
                everywhere = not settings.namespaces
                installed = await look.at_installation(definition=everywhere)
                stages = stages_of(settings, job, member.namespace)
                needed = await look.at_job(stages, member.namespace, nodes=everywhere)
                used = {stage.slots.pool for stage in stages if stage.slots is not None}
                turns = await look.at_turns(stages, used) if used and everywhere else []
                return [*needed, *turns, *installed]

            functions = functions_of(identity, member, job, root, settings, os.environ)
            platform = KnativePlatform(
                client,
                watch,
                job=identity,
                functions=functions,
                settings=settings,
                keep_alive=member.platform_keep_alive,
                stall_seconds=job.spec.limits.stall,
                on_state=both,
                on_problem=report.trouble,
                environment=environment_of(identity, job, settings),
                shelter=shelter_of(identity, job, functions["generation"], settings),
                slots=pools.share_of(member),
                places=places,
            )
            return JobPlatform(platform, member, Preflight(look_around, tell))

        yield make


def functions_of(
    identity: JobIdentity,
    member: PoolMember,
    job: RLHFJob,
    root: str,
    settings: ClusterSettings,
    environment: Mapping[str, str],
) -> Mapping[Stage, StageFunction]:
    """Return the stages of a job with their pods: the stage's settings over the job's over the cluster's defaults.

    Args:
        environment: the operator's own variables, which name the stores that the functions use too.

    Raises:
        ForeignFoldersError: the job's pods would mount the folders of other namespaces.
    """
    env = {} if member.emulation is None else {"RLHFLESS_EMULATION": member.emulation.model_dump_json()}
    slots = slots_wanted(member, settings)
    functions: dict[Stage, StageFunction] = {}
    for stage, merged in pods_by_stage(job.on_cluster(settings.pods_in(member.namespace)).spec).items():
        connects_to = frozenset(addresses_of(job, root, {**environment, **(merged.env or {})}))
        connects_to |= gateways_of(job, settings)
        instances = job.spec.learning.instances.max if stage == "learning" else 1
        relays = stage == "generation" and job.spec.generation.weight_relays == "auto"
        functions[stage] = StageFunction(
            identity, stage, merged, root, env, connects_to, slots.get(stage), instances, relays
        )
        check_store_mounts(service(functions[stage], settings), settings, member.namespace)
    return functions
