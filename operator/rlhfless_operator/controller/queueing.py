"""Jobs in Kueue's queues: create their Workloads, and find out whether they may run."""

import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rlhfless_functions.api import Stage
from rlhfless_operator.controller import kueue
from rlhfless_operator.controller.kueue import Admission, PodSet
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.instance_gpus import pods_by_stage
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import (
    ApiError,
    ForbiddenError,
    InvalidError,
    Kind,
    KnativeClient,
    KubernetesObject,
    NotFoundError,
    ResourceClient,
)
from rlhfless_operator.platforms.cluster_settings import ClusterSettings

_VERSIONS = ("v1beta2", "v1beta1")
"""Versions of Kueue's API, the newest first; the used part is the same in both."""


class Queues:
    """Kueue's queues for the jobs of an operator.

    Args:
        settings: the operator's settings, with the defaults of function pods, whose resources Kueue counts.
    """

    def __init__(self, client: KnativeClient, settings: ClusterSettings) -> None:
        self._clients: dict[str, ResourceClient[KubernetesObject]] = {
            version: client.resource(Kind(kueue.GROUP, version, kueue.PLURAL, KubernetesObject))
            for version in _VERSIONS
        }
        self._settings = settings
        self._client: ResourceClient[KubernetesObject] | None = None

    async def admit(self, resource: JobResource, job: RLHFJob, actors: ActorRange) -> Admission:
        """Queue a job without running pods. Returns whether it may run, and with how many of its actors.

        Creates the Workload if there is none. Returns the quota of an evicted Workload, because none of the job's pods
        runs any more.
        """
        try:
            for version, client in self._clients.items():
                try:
                    document = await self._applied(version, client, resource, job, actors)
                except NotFoundError:
                    continue
                self._client = client
                return kueue.admission_of(document)
            return _waiting(
                f"the label {kueue.QUEUE_LABEL} needs Kueue, which this cluster does not have; remove the label,"
                f" or install Kueue"
            )
        except ForbiddenError as error:
            return _waiting(
                f"the operator may not create Workloads: {error}; grant it the permission, or remove the queue's label"
            )
        except ApiError as error:
            return _waiting(f"Kueue's API does not answer: {error}")

    async def withdrawn(self, resource: JobResource) -> str | None:
        """Return why a running job must stop; None if it may continue, also while the API server does not answer."""
        if self._client is None:
            return None
        name = kueue.workload_name(resource.name, resource.uid)
        try:
            workload = await self._client.get(resource.namespace, name)
        except NotFoundError:
            return "its Workload was deleted"
        except ApiError:
            return None
        admission = kueue.admission_of(_document(workload))
        return None if admission.state == "admitted" else admission.message

    async def leave(self, resource: JobResource) -> None:
        """Take a job without running pods out of its queue, because it has ended or is suspended.

        If the API server does not answer, the Workload stays until the job is deleted.
        """
        name = kueue.workload_name(resource.name, resource.uid)
        for client in [self._client] if self._client else self._clients.values():
            with contextlib.suppress(ApiError):
                await client.delete(resource.namespace, name)

    async def _applied(
        self,
        version: str,
        client: ResourceClient[KubernetesObject],
        resource: JobResource,
        job: RLHFJob,
        actors: ActorRange,
    ) -> dict[str, Any]:
        assert resource.queue is not None
        manifest = kueue.workload(
            version=version,
            namespace=resource.namespace,
            job=resource.name,
            uid=resource.uid,
            queue=resource.queue,
            priority=job.spec.priority,
            pod_sets=pod_sets(job, actors, self._settings),
        )
        name = manifest["metadata"]["name"]
        try:
            applied = await client.apply(manifest)
        except InvalidError:
            # A Workload with quota can't change. Since this job has changed, it must queue again.
            if not await client.delete(resource.namespace, name):
                raise
            applied = await client.apply(manifest)
        status = kueue.quota_released(_document(applied), now=_now())
        if status is None:
            return _document(applied)
        changes = {"metadata": {"resourceVersion": applied.metadata.resource_version}, "status": status}
        return _document(await client.patch(resource.namespace, name, changes, subresource="status"))


def pod_sets(job: RLHFJob, actors: ActorRange, settings: ClusterSettings) -> list[PodSet]:
    """Return the most pods that a job holds, by stage."""
    learners, preparers = job.spec.learning.instances.max, job.spec.preparation.instances.set_aside
    ranges: dict[Stage, ActorRange] = {
        "generation": actors,
        "preparation": ActorRange(preparers, preparers),
        "learning": ActorRange(learners, learners),
    }
    return [
        PodSet(stage, ranges[stage].most, ranges[stage].least, _template(pods, settings))
        for stage, pods in pods_by_stage(job.on_cluster(settings.pods).spec).items()
    ]


def within(actors: ActorRange, admission: Admission) -> ActorRange:
    """Limit generation instances to the admitted number, but not below the job's minimum."""
    count = admission.counts.get("generation")
    return actors if count is None else actors.within(max(count, actors.least))


def _template(pods: PodsSpec, settings: ClusterSettings) -> Mapping[str, Any]:
    resources = pods.resources.model_dump(mode="json", exclude_none=True) if pods.resources else {}
    spec = {
        "containers": [{"name": "function", "image": pods.image or settings.functions_image, "resources": resources}],
        "restartPolicy": "Always",
        "nodeSelector": pods.node_selector,
        "tolerations": [
            toleration.model_dump(mode="json", by_alias=True, exclude_none=True)
            for toleration in pods.tolerations or []
        ],
        "affinity": pods.affinity,
        "priorityClassName": pods.priority_class,
        "runtimeClassName": pods.runtime_class,
    }
    return {"spec": {name: value for name, value in spec.items() if value}}


def _waiting(message: str) -> Admission:
    return Admission("waiting", message, {})


def _document(workload: KubernetesObject) -> dict[str, Any]:
    return workload.model_dump(mode="json", by_alias=True)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
