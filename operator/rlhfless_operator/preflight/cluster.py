"""Fetches the cluster's objects for the checks."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from kubernetes.aio.client import ApiClient

from rlhfless_functions import artifacts
from rlhfless_operator.job.actor_range import actor_range
from rlhfless_operator.job.generated.crd import NAME, crd
from rlhfless_operator.job.instance_gpus import gpus_of, pods_by_stage
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob
from rlhfless_operator.knative import ApiError, ForbiddenError, NotFoundError, Transport
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import JobIdentity, SlotsWanted, StageFunction, service
from rlhfless_operator.platforms.room import DEFAULT_POOL, pool_of, room_in_pool, why_not_in_quotas
from rlhfless_operator.preflight.checks import (
    Knative,
    StagePods,
    check_autoscaler,
    check_capacity,
    check_definition,
    check_deployment,
    check_features,
    check_options,
    check_quota,
    check_release,
    check_timeouts,
    check_version,
    check_volumes,
)
from rlhfless_operator.preflight.devices import DynamicResources
from rlhfless_operator.preflight.findings import Finding
from rlhfless_operator.preflight.kernels import check_kernels
from rlhfless_operator.preflight.permissions import PERMISSIONS, TURNS_PERMISSIONS, Permission, check_permissions
from rlhfless_operator.preflight.turns import check_instances, check_pool, pools_with_turns, say_turns

_MAPS = ("features", "autoscaler", "defaults", "deployment")
_PATIENCE_SECONDS = 5.0
_PREFLIGHT = "preflight"
_DEVICES = "resource.k8s.io"
_DEVICE_KINDS = ("deviceclasses", "resourceslices")
_Object = dict[str, Any]
Fetched = TypeVar("Fetched")


async def preflight(
    api: ApiClient,
    settings: ClusterSettings,
    *,
    job: RLHFJob | None = None,
    namespace: str | None = None,
    service_account: str | None = None,
) -> list[Finding]:
    """Check everything that jobs need from a cluster.

    Args:
        api: the official client, with the cluster's configuration.
        settings: the operator's settings.
        job: a job whose needs are checked too; without it, the operator's defaults are.
        namespace: namespace whose quotas are checked; by default the job's, else the first that the operator serves,
            else `default`.
        service_account: `NAMESPACE/NAME` of the account whose permissions are checked; by default the caller's.

    Raises:
        UnavailableError: the API server does not answer.
    """
    look = ClusterLook(api, settings, service_account=service_account)
    place = namespace or (job.metadata.namespace if job else None) or next(iter(settings.namespaces), "default")
    with suppress(ForbiddenError):
        await look.reach()
    stages = stages_of(settings, job, place)
    everything = await asyncio.gather(
        look.at_job(stages, place, job=job),
        look.at_turns(stages, pools_with_turns(settings.pools)),
        look.at_installation(),
        asyncio.to_thread(check_store, settings.artifacts),
    )
    needed, turns, installed, store = everything
    return [*check_options(job, settings, place), *needed, *turns, *installed, check_release(settings), store]


class ClusterLook:
    """Checks a cluster for any number of jobs. Caches what they share.

    Args:
        api: the official client, with the cluster's configuration.
        settings: the operator's settings.
        service_account: `NAMESPACE/NAME` of the account whose permissions are checked; by default the caller's.
        memory: seconds until fetched objects expire.
    """

    def __init__(
        self, api: ApiClient, settings: ClusterSettings, *, service_account: str | None = None, memory: float = 60.0
    ) -> None:
        self._transport = Transport(api, patience=_PATIENCE_SECONDS)
        self._settings = settings
        self._service_account = service_account
        self._memory = memory
        self._fetched: dict[str, tuple[float, asyncio.Task[Any]]] = {}

    async def reach(self) -> None:
        """Ask the API server for its version.

        Raises:
            ApiError: the server does not answer (`UnavailableError`), or refuses.
        """
        await self._transport.get("/version")

    async def at_job(
        self, stages: Sequence[StagePods], namespace: str, *, nodes: bool = True, job: RLHFJob | None = None
    ) -> list[Finding]:
        """Check what the pods of a job need: Knative's settings, volumes, GPUs and quota.

        Args:
            nodes: whether to check GPUs and kernels, which needs the right to list nodes.
            job: the job itself, if there is one.
        """
        knative, quotas = await asyncio.gather(
            self._once("knative", lambda: _knative(self._transport, self._settings.knative_namespace)),
            self._once(f"quotas of {namespace}", lambda: _quotas(self._transport, namespace)),
        )
        findings = [check_volumes(stages)]
        if isinstance(knative, Knative):
            findings += _check_knative(knative, self._settings, stages)
        else:
            findings.append(knative)
        if nodes:
            found = await self._once("nodes", lambda: _node_statuses(self._transport))
            if isinstance(found, Finding):
                findings.append(found)
            else:
                findings.append(check_capacity([status.get("allocatable", {}) for status in found], stages))
                releases = [status.get("nodeInfo", {}).get("kernelVersion", "") for status in found]
                findings += check_kernels(releases, job) if job is not None else []
        if isinstance(quotas, Finding):
            return [*findings, quotas]
        findings.append(check_quota(quotas, stages, namespace))
        if job is not None and (refusal := why_not_in_quotas(job, self._settings, quotas)) is not None:
            findings.append(Finding("spec.async", "error", refusal))
        return findings

    async def at_turns(self, stages: Sequence[StagePods], names: Collection[str]) -> list[Finding]:
        """Check what pools with a DeviceClass need. Without such pools, report what the cluster lacks for them.

        Args:
            stages: pods of a job.
            names: names of the pools with a DeviceClass.
        """
        pools = {name: self._settings.pools[name] for name in names}
        found = await self._once("devices", lambda: _devices(self._transport, sure=bool(pools)))
        if isinstance(found, Finding):
            return [found]
        if not pools:
            return [say_turns(found)]
        findings = [check_pool(name, pool, found) for name, pool in pools.items()]
        for name, pool in pools.items():
            of_pool = [stage for stage in stages if stage.slots and stage.slots.pool == name]
            findings += [check_instances(name, pool, of_pool)] if of_pool else []
        return findings

    async def at_installation(self, *, definition: bool = True) -> list[Finding]:
        """Check what every job needs: the operator's permissions and the CustomResourceDefinition.

        Args:
            definition: whether to check the CustomResourceDefinition, which needs a cluster-wide permission.
        """
        account = self._service_account
        wanted = (*PERMISSIONS, *(TURNS_PERMISSIONS if self._settings.has_slots else ()))
        looks: list[Awaitable[Finding]] = [
            self._once(f"permissions in {where}", partial(_permissions, self._transport, wanted, where, account))
            for where in self._settings.namespaces or (None,)
        ]
        if definition:
            looks.append(self._once("definition", lambda: _definition(self._transport)))
        return list(await asyncio.gather(*looks))

    async def _once(self, name: str, fetch: Callable[[], Coroutine[Any, Any, Fetched]]) -> Fetched:
        """Return the answer of `fetch`, cached for a while. Concurrent callers wait for the same answer."""
        now = asyncio.get_running_loop().time()
        since, task = self._fetched.get(name, (0.0, None))
        if task is None or now > since + self._memory or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(fetch())
            self._fetched[name] = (now, task)
        return cast("Fetched", await asyncio.shield(task))


def stages_of(settings: ClusterSettings, job: RLHFJob | None, namespace: str) -> list[StagePods]:
    """Return the pods of every stage: the job's settings over the cluster's defaults.

    If a job does not limit its generation instances, their number is the room in its pool, or else one. A number that
    comes from a quota fits the quota and needs no check.

    Args:
        namespace: namespace of the job.
    """
    if job is None:
        return [StagePods("every stage", settings.pods, slots=_slots(settings, DEFAULT_POOL, settings.pods))]
    actors = actor_range(job.spec, room_in_pool(job, settings, namespace))
    pool = pool_of(job)
    most = {"generation": actors.most, "preparation": job.spec.preparation.instances.set_aside}
    return [
        StagePods(stage, pods, most.get(stage, 1), _slots(settings, pool, pods))
        for stage, pods in pods_by_stage(job.on_cluster(settings.pods).spec).items()
    ]


def _slots(settings: ClusterSettings, name: str, pods: PodsSpec) -> SlotsWanted | None:
    """Return the slots that pods use in turns, if their pool has a DeviceClass."""
    pool = pools_with_turns(settings.pools).get(name)
    if pool is None or not (gpus := gpus_of(pods, pool.resource)):
        return None
    return SlotsWanted(name, gpus, pool.resource)


def pod_spec_of(pods: PodsSpec, settings: ClusterSettings) -> Mapping[str, Any]:
    """Return the pod spec of the Knative Service of a function with these pods."""
    job = JobIdentity("default", _PREFLIGHT, "", API_VERSION, KIND)
    function = StageFunction(job, "generation", pods, root=_PREFLIGHT)
    spec: Mapping[str, Any] = service(function, settings)["spec"]["template"]["spec"]
    return spec


async def _knative(transport: Transport, namespace: str) -> Knative | Finding:
    folder = f"/api/v1/namespaces/{namespace}/configmaps"
    try:
        found = await asyncio.gather(*(transport.get(f"{folder}/config-{name}") for name in _MAPS))
    except NotFoundError:
        remedy = (
            "Install Knative Serving, or name its namespace: --knative-namespace here, knative.namespace in the chart."
        )
        return Finding("knative", "error", f"namespace {namespace} has no ConfigMaps of Knative Serving", remedy)
    except ApiError as error:
        remedy = "Install the chart with knative.readSettings: true, or use an account that may read them."
        return Finding("knative", "unknown", f"Knative's ConfigMaps can't be read: {error.message}", remedy)
    data = {name: content.get("data") or {} for name, content in zip(_MAPS, found, strict=True)}
    labels: Mapping[str, str] = found[0]["metadata"].get("labels", {})
    return Knative(namespace, labels.get("app.kubernetes.io/version", ""), **data)


def _check_knative(knative: Knative, settings: ClusterSettings, stages: Sequence[StagePods]) -> list[Finding]:
    return [
        check_version(knative.version),
        check_features(knative, [pod_spec_of(stage.pods, settings) for stage in stages]),
        check_autoscaler(knative, settings.initial_scale),
        check_timeouts(knative, settings.request_timeout),
        check_deployment(knative),
    ]


async def _node_statuses(transport: Transport) -> list[Mapping[str, Any]] | Finding:
    """Return the status of every schedulable node."""
    try:
        nodes = await transport.get("/api/v1/nodes")
    except ApiError as error:
        return Finding("capacity", "unknown", f"nodes can't be listed: {error.message}")
    return [node["status"] for node in nodes["items"] if not node["spec"].get("unschedulable")]


async def _quotas(transport: Transport, namespace: str) -> list[Mapping[str, Any]] | Finding:
    try:
        return list((await transport.get(f"/api/v1/namespaces/{namespace}/resourcequotas"))["items"])
    except ApiError as error:
        return Finding(f"quota of {namespace}", "unknown", f"quotas can't be listed: {error.message}")


async def _devices(transport: Transport, *, sure: bool) -> DynamicResources | Finding:
    """Fetch what pods need to use GPUs in turns.

    Args:
        sure: whether a pool needs the devices. If none does, they are listed only if the account may.
    """
    try:
        server = str((await transport.get("/version"))["gitVersion"])
        group: _Object = {"versions": []}
        with suppress(NotFoundError):
            group = await transport.get(f"/apis/{_DEVICES}")
        found = DynamicResources(server, tuple(each["version"] for each in group["versions"]))
        rights = [Permission(_DEVICES, resource, "list") for resource in _DEVICE_KINDS]
        if not found.has_claims:
            return found
        if not sure and not all([await _allowed(transport, right, None, None) for right in rights]):
            return found
    except ApiError as error:
        return Finding("turns", "unknown", f"the API server does not list the APIs that it serves: {error.message}")
    try:
        classes, slices = [(await transport.get(f"/apis/{_DEVICES}/v1/{kind}"))["items"] for kind in _DEVICE_KINDS]
    except ApiError as error:
        return replace(found, refusal=error.message)
    return replace(found, classes={each["metadata"]["name"]: each for each in classes}, slices=slices)


async def _permissions(
    transport: Transport, wanted: Sequence[Permission], namespace: str | None, service_account: str | None
) -> Finding:
    try:
        answers = await asyncio.gather(
            *(_allowed(transport, permission, namespace, service_account) for permission in wanted)
        )
    except ApiError as error:
        return Finding("permissions", "unknown", f"the API server does not review permissions: {error.message}")
    return check_permissions(dict(zip(wanted, answers, strict=True)), namespace)


async def _allowed(
    transport: Transport, permission: Permission, namespace: str | None, service_account: str | None
) -> bool:
    resource, _, subresource = permission.resource.partition("/")
    attributes = {"verb": permission.verb, "group": permission.group, "resource": resource, "subresource": subresource}
    spec: _Object = {"resourceAttributes": {**attributes, "namespace": namespace or ""}}
    kind = "SelfSubjectAccessReview"
    if service_account is not None:
        kind = "SubjectAccessReview"
        spec["user"] = "system:serviceaccount:" + service_account.replace("/", ":")
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    answer = await transport.send("create", "POST", f"/apis/authorization.k8s.io/v1/{kind.lower()}s", body=body)
    return bool(answer["status"]["allowed"])


async def _definition(transport: Transport) -> Finding:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{NAME}"
    try:
        found: _Object | None = await transport.get(path)
    except NotFoundError:
        found = None
    except ApiError as error:
        return Finding("definition", "unknown", f"the CustomResourceDefinition can't be read: {error.message}")
    return check_definition(found, crd())


def check_store(base: str) -> Finding:
    """Check that the artifact store can write, read and remove a file.

    Args:
        base: folder or URI.
    """
    local = artifacts.local_path(base)
    if local is not None and not local.exists():
        remedy = "kubectl exec --namespace NAMESPACE deployment/rlhfless -- python -m rlhfless_operator preflight"
        return Finding("artifacts", "unknown", f"{base} is a folder in the pods and can only be checked there", remedy)
    probe = artifacts.join(base, f".{_PREFLIGHT}-{uuid.uuid4().hex}")
    try:
        artifacts.write_bytes(probe, b"rlhfless")
        same = artifacts.read_bytes(probe) == b"rlhfless"
        artifacts.remove(probe)
    except artifacts.ArtifactError as error:
        return Finding("artifacts", "error", str(error), _STORE_REMEDY)
    if not same:
        return Finding("artifacts", "error", f"{base} returns different content than was written", _STORE_REMEDY)
    return Finding("artifacts", "ok", f"{base} is writable")


_STORE_REMEDY = (
    "For a folder: give user 65532 write access. For an object store: name a Secret with its credentials in "
    "the chart's artifacts.secrets."
)
