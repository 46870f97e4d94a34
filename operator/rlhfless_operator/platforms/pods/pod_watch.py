"""One watch of all function pods, shared by the jobs of an operator."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, Self

from pydantic import Field

from rlhfless_operator.job.charged import FUNCTIONS, Function
from rlhfless_operator.knative import Kind, KnativeClient, KubernetesModel, KubernetesObject
from rlhfless_operator.knative.models import Condition
from rlhfless_operator.platforms.pods.manifests import (
    CONTAINER,
    DELETION_COST,
    JOB_LABEL,
    MANAGED_BY,
    MANAGER,
    SLOTS,
    STAGE_LABEL,
)

logger = logging.getLogger(__name__)

_FATAL_REASONS = frozenset(
    {
        "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull",
        "ImagePullBackOff", "InvalidImageName", "RunContainerError", "StartError",
    }
)  # fmt: skip
"""Reasons of a waiting container that waiting does not fix."""
_REVISION = "serving.knative.dev/revision"
_PREPARED = "PodReadyToStartContainers"
"""Condition of a pod whose claims, volumes and network are ready. Images are pulled after that."""


class ContainerStatus(KubernetesModel):
    """The status of a container."""

    name: str
    state: dict[str, dict[str, Any]] = Field(default_factory=dict)
    last_state: dict[str, dict[str, Any]] = Field(default_factory=dict)


class PodStatus(KubernetesModel):
    """The status of a pod."""

    phase: str = "Pending"
    conditions: tuple[Condition, ...] = ()
    pod_ip: str | None = Field(default=None, alias="podIP")
    reason: str = ""
    message: str = ""
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class PodClaim(KubernetesModel):
    """A ResourceClaim that a pod names."""

    resource_claim_name: str = ""


class PodSpec(KubernetesModel):
    """The spec of a pod."""

    node_name: str = ""
    resource_claims: tuple[PodClaim, ...] = ()


class Pod(KubernetesObject):
    """The parts of a pod that the platform reads."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


PODS = Kind("", "v1", "pods", Pod)


@dataclass(frozen=True)
class PodView:
    """A platform's view of one of its pods."""

    name: str
    uid: str
    stage: Function
    created: datetime
    ip: str | None
    ready: bool
    deleting: bool
    ended: bool
    """Whether its containers have ended permanently, like those of an evicted pod."""
    deletion_cost: str | None
    """Its deletion cost: of two pods, the one with the lower cost is deleted first."""
    problem: str
    """Its problem, with Kubernetes' own reason; empty if it has none."""
    fatal: bool
    """Whether waiting does not fix the problem."""
    slots: tuple[str, ...] = ()
    """Names of the ResourceClaims that it uses in turns with others."""
    claims: tuple[str, ...] = ()
    """Names of all ResourceClaims that must exist before it can start."""
    overlooked: bool = False
    """Whether it waits for a node, and the scheduler has not reported anything about it yet."""
    node: str = ""
    """Name of its node; empty until it has one."""
    lacks_memory: bool = False
    """Whether it waits for a node with enough memory."""
    unprepared: bool = False
    """Whether its node has not yet prepared what its containers need: claims, volumes and a network."""
    revision: str = ""
    """Name of its Revision."""
    process: str | None = None
    """Start time of its function's process, in Kubernetes' format; None while none runs."""


class JobListener(Protocol):
    """Gets the changes of one job's pods."""

    def pod_changed(self, pod: PodView) -> None:
        """Handle a pod that is new or has changed."""

    def pod_gone(self, pod: PodView) -> None:
        """Handle a pod that is gone."""

    def replaced(self) -> None:
        """Handle the loss of the subscription to another listener."""


def view_of(pod: Pod) -> PodView | None:
    """Return a platform's view of a pod; None if it is not a function's pod."""
    stage = pod.metadata.labels.get(STAGE_LABEL)
    if stage not in FUNCTIONS or pod.metadata.creation_timestamp is None:
        return None
    conditions = {condition.type: condition for condition in pod.status.conditions}
    ready = conditions.get("Ready")
    deleting = pod.metadata.deletion_timestamp is not None
    problem, fatal = _problem(pod.status, conditions.get("PodScheduled"), deleting)
    waits = pod.status.phase == "Pending" and not deleting
    return PodView(
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        stage=stage,
        created=pod.metadata.creation_timestamp,
        ip=pod.status.pod_ip,
        ready=ready is not None and ready.status == "True",
        deleting=deleting,
        ended=pod.status.phase in ("Failed", "Succeeded"),
        deletion_cost=pod.metadata.annotations.get(DELETION_COST),
        problem=problem,
        fatal=fatal,
        node=pod.spec.node_name,
        lacks_memory=not deleting and problem.startswith("Unschedulable: ") and "Insufficient memory" in problem,
        revision=pod.metadata.labels.get(_REVISION, ""),
        process=_process(pod.status),
        slots=tuple(named.split(",")) if (named := pod.metadata.annotations.get(SLOTS)) else (),
        claims=tuple(claim.resource_claim_name for claim in pod.spec.resource_claims if claim.resource_claim_name),
        overlooked=waits and "PodScheduled" not in conditions,
        unprepared=waits and _is(conditions, "PodScheduled", "True") and _is(conditions, _PREPARED, "False"),
    )


def _is(conditions: Mapping[str, Condition], kind: str, status: str) -> bool:
    return kind in conditions and conditions[kind].status == status


def _process(status: PodStatus) -> str | None:
    running = (each.state.get("running") for each in status.container_statuses if each.name == CONTAINER)
    return next((str(state.get("startedAt")) for state in running if state is not None), None)


def _problem(status: PodStatus, scheduled: Condition | None, deleting: bool) -> tuple[str, bool]:
    if scheduled is not None and scheduled.status == "False":
        return f"{scheduled.reason}: {scheduled.message}", False
    # The containers of a deleted pod end because they were told to, so their exit is not a problem.
    if status.phase == "Failed" and (status.reason or not deleting):
        return f"{status.reason or 'Failed'}: {status.message or 'the pod has ended'}", True
    for container in (*status.init_container_statuses, *status.container_statuses):
        waiting = container.state.get("waiting", {})
        told_to_end = deleting and "terminated" in container.state
        ended = {} if told_to_end else container.state.get("terminated") or container.last_state.get("terminated") or {}
        how = f"{ended.get('reason', 'ended')}, exit code {ended.get('exitCode')}" if ended else ""
        if waiting.get("reason") in _FATAL_REASONS:
            details = "; ".join(text for text in (waiting.get("message", ""), how) if text)
            return f"{waiting['reason']}: container {container.name}: {details}", True
        if ended.get("exitCode"):
            return f"container {container.name} ended: {how}", False
    return "", False


class PodWatch:
    """All function pods of a cluster, or of some namespaces: `async with PodWatch(client) as watch`.

    Args:
        client: client of the cluster.
        namespaces: namespaces to watch; all if empty.
    """

    def __init__(self, client: KnativeClient, namespaces: Sequence[str] = ()) -> None:
        self._pods = client.resource(PODS)
        self._namespaces: list[str | None] = list(namespaces) or [None]
        self._unsynced = set(self._namespaces)
        self._synced = asyncio.Event()
        self._known: dict[tuple[str, str], dict[str, PodView]] = {}
        self._listeners: dict[tuple[str, str], JobListener] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._follow(namespace)) for namespace in self._namespaces]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def synced(self) -> None:
        """Wait until the initial pods are known.

        Raises:
            ApiError: the watch is refused.
        """
        waiting = asyncio.ensure_future(self._synced.wait())
        try:
            await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
        finally:
            waiting.cancel()

    def subscribe(self, namespace: str, job: str, listener: JobListener) -> None:
        """Report a job's pods to `listener`, starting with the existing ones. A job has one listener at a time."""
        key = (namespace, job)
        if (before := self._listeners.pop(key, None)) is not None:
            before.replaced()
        self._listeners[key] = listener
        for pod in self._known.get(key, {}).values():
            listener.pod_changed(pod)

    def unsubscribe(self, namespace: str, job: str, listener: JobListener) -> None:
        """Stop reporting to `listener`."""
        if self._listeners.get((namespace, job)) is listener:
            del self._listeners[namespace, job]

    async def _follow(self, namespace: str | None) -> None:
        async for event in self._pods.watch(namespace, label_selector=f"{MANAGED_BY}={MANAGER},{JOB_LABEL}"):
            if event.object is None:
                self._unsynced.discard(namespace)
                if not self._unsynced:
                    self._synced.set()
                continue
            pod = view_of(event.object)
            if pod is None:
                continue
            metadata = event.object.metadata
            key = (metadata.namespace, metadata.labels[JOB_LABEL])
            try:
                self._tell(key, pod, gone=event.type == "deleted")
            except Exception:
                logger.exception("a listener of %s/%s failed", *key)

    def _tell(self, key: tuple[str, str], pod: PodView, *, gone: bool) -> None:
        pods = self._known.setdefault(key, {})
        listener = self._listeners.get(key)
        if gone:
            pods.pop(pod.uid, None)
            if not pods:
                del self._known[key]
            if listener is not None:
                listener.pod_gone(pod)
        else:
            pods[pod.uid] = pod
            if listener is not None:
                listener.pod_changed(pod)
