"""Knative over a real API server: its reconcilers, the ReplicaSet, the kubelet, activator and ingress, as far as a
platform can tell them from the real ones. What was measured on a real Knative is what they are made after.

    async with KnativeEmulation(client) as knative:
        settings = ClusterSettings(functions_image="any", ingress=knative.url)

Pods are real objects of the API server; what runs in one is a `FakeFunction` in this process, or whatever `launch`
starts.
"""

import asyncio
import base64
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

from rlhfless_operator.knative import KnativeClient, NotFoundError, Revision, Service
from rlhfless_operator.platforms.pods.job_objects import SECRETS
from rlhfless_operator.platforms.pods.manifests import DELETION_COST, MAX_SCALE, MIN_SCALE
from rlhfless_operator.platforms.pods.pod_watch import PODS
from tests.clusters.emulated_revisions import CRASHED, EmulatedPod, EmulatedRevision
from tests.clusters.knative_definitions import GROUP
from tests.clusters.reverse_proxy import pass_on
from tests.clusters.running_functions import Launch, fake_functions

REVISION_LABEL = f"{GROUP}/revision"
_SERVICE_LABEL = f"{GROUP}/service"
_TICK_SECONDS = 0.02
_WINDOW_SECONDS = 1.0
_KILLED_WITHIN_SECONDS = 5
"""A shorter grace period is over before queue-proxy lets a container know."""


@dataclass
class KnativeEmulation:
    """Knative Serving on a cluster that has its CRDs.

    Args:
        client: of the API server.
        launch: starts what runs in a pod.
        start_seconds: from a pod's creation to its readiness.
        terminating_seconds: for which a deleted pod is still there, as queue-proxy's 30 s.
        lingering_seconds: for which it is there after its process has ended.
        asleep: whether a new Revision's bounds count only after a first request.

    Attributes:
        pod_status: a status that new pods get and keep, such as one of a pod that can't be scheduled.
        down: whether the ingress answers everything with 503.
        refuse: status and reason that the next requests are answered with, by plain text.
        revision_conditions: that Revisions get.
        memory: pods that its node's memory holds; those beyond it are Pending until another one is gone.
        room: pods that the cluster has room for; the others are not even made, as under a quota.
        admit: what a webhook makes of a new pod in a namespace; the pod is not made where it raises ValueError.
    """

    client: KnativeClient
    launch: Launch | None = None
    start_seconds: float = 0.05
    terminating_seconds: float = 0.2
    lingering_seconds: float = 0.0
    asleep: bool = False
    pod_status: dict[str, Any] | None = None
    down: bool = False
    refuse: list[tuple[int, str]] = field(default_factory=list)
    revision_conditions: list[dict[str, str]] = field(default_factory=list)
    memory: int | None = None
    room: int = 1000
    admit: Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]] | None = None
    url: str = ""
    revisions: dict[tuple[str, str], EmulatedRevision] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Host and path of every request."""
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def __aenter__(self) -> "KnativeEmulation":
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        self._pods_api = self.client.resource(PODS)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._route)
        self._ingress = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._ingress.setup()
        await web.TCPSite(self._ingress, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._ingress.addresses[0][1]}"
        for coroutine in (self._watch_services(), self._watch_revisions(), self._watch_pods(), self._scale()):
            self._spawn(coroutine)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ingress.cleanup()
        await self._session.close()
        for pod in self.pods:
            if pod.running is not None:
                await pod.running.kill()
            with contextlib.suppress(NotFoundError):
                await self._pods_api.delete(pod.namespace, pod.name, grace_period_seconds=0)

    @property
    def pods(self) -> list[EmulatedPod]:
        """All pods, those on their way out included."""
        return [pod for revision in self.revisions.values() for pod in revision.pods.values()]

    def pod(self, name: str) -> EmulatedPod:
        """A pod by its name."""
        return next(pod for pod in self.pods if pod.name == name)

    async def crash(self, name: str) -> None:
        """Kill what runs in a pod, and the pod with it, at once."""
        pod = self.pod(name)
        if pod.running is not None:
            await pod.running.kill()
        await self._pods_api.delete(pod.namespace, name, grace_period_seconds=0)

    # --- reconcilers ---

    async def _watch_services(self) -> None:
        async for event in self.client.services.watch():
            service = event.object
            if service is None:
                continue
            if event.type == "deleted":
                await self._collect(service)
            elif not service.observed:
                await self._reconcile(service)

    async def _reconcile(self, service: Service) -> None:
        metadata = service.metadata
        template = service.spec["template"]
        name = service.status.latest_created_revision_name
        current = self.revisions.get((metadata.namespace, name or ""))
        if current is None or current.template != template:
            name = f"{metadata.name}-{metadata.generation:05d}"
            await self.client.revisions.apply(
                {
                    "apiVersion": f"{GROUP}/v1",
                    "kind": "Revision",
                    "metadata": {
                        "name": name,
                        "namespace": metadata.namespace,
                        "labels": {**template["metadata"]["labels"], _SERVICE_LABEL: metadata.name},
                        "annotations": template["metadata"]["annotations"],
                    },
                    "spec": template["spec"],
                }
            )
            revision = EmulatedRevision(name, metadata.namespace, metadata.name, template, awake=not self.asleep)
            self.revisions[metadata.namespace, name] = revision
        address = f"http://{metadata.name}.{metadata.namespace}.svc.cluster.local"
        status = {
            "observedGeneration": metadata.generation,
            "url": address,
            "address": {"url": address},
            "latestCreatedRevisionName": name,
            "latestReadyRevisionName": name,
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        with contextlib.suppress(NotFoundError):
            await self.client.services.patch(
                metadata.namespace, metadata.name, {"status": status}, subresource="status"
            )

    async def _collect(self, service: Service) -> None:
        """What the garbage collector does."""
        for revision in list(self.revisions.values()):
            if (revision.namespace, revision.service) == (service.metadata.namespace, service.metadata.name):
                await self.client.revisions.delete(revision.namespace, revision.name)
                revision.least, revision.most, revision.service = 0, 1, ""

    async def _watch_revisions(self) -> None:
        async for event in self.client.revisions.watch():
            if event.object is None or event.type == "deleted":
                continue
            found: Revision = event.object
            revision = self.revisions.get((found.metadata.namespace, found.metadata.name))
            if revision is not None:
                revision.least = int(found.metadata.annotations.get(MIN_SCALE, "0"))
                revision.most = int(found.metadata.annotations.get(MAX_SCALE, "0"))
            conditions = self.revision_conditions
            if found.status.model_dump()["conditions"] != conditions:
                patch = {"status": {"conditions": conditions}}
                with contextlib.suppress(NotFoundError):
                    await self.client.revisions.patch(
                        found.metadata.namespace, found.metadata.name, patch, subresource="status"
                    )

    async def _scale(self) -> None:
        """The autoscaler and the ReplicaSet."""
        while True:
            for revision in list(self.revisions.values()):
                wanted = revision.least if revision.awake else 0
                if revision.poked_until > time.monotonic():
                    wanted = max(1, wanted)
                wanted = min(wanted, revision.most) if revision.most else wanted
                active = revision.active
                for _ in range(min(wanted - len(active), self.room - len(self.pods))):
                    await self._create(revision)
                # The ReplicaSet's order, as far as it matters here.
                active.sort(key=lambda pod: (pod.ready, pod.cost, -pod.number))
                for pod in active[: max(0, len(active) - wanted)]:
                    pod.deleting = True
                    with contextlib.suppress(NotFoundError):
                        await self._pods_api.delete(pod.namespace, pod.name)
            await asyncio.sleep(_TICK_SECONDS)

    # --- pods ---

    async def _create(self, revision: EmulatedRevision) -> None:
        number = next(self._numbers)
        name = f"{revision.name}-deployment-{number:04d}"
        template = revision.template
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": revision.namespace,
                "labels": {**template["metadata"]["labels"], REVISION_LABEL: revision.name},
                "annotations": dict(template["metadata"]["annotations"]),
            },
            "spec": {
                # On a node: its deletion takes its time.
                "nodeName": "node",
                "terminationGracePeriodSeconds": template["spec"]["timeoutSeconds"],
                "containers": [{"name": "function", "image": "none"}],
            },
        }
        if self.admit is not None:
            try:
                manifest = await self.admit(manifest, revision.namespace)
            except ValueError:
                return
        pod = EmulatedPod(name, revision.namespace, revision.name, number=number)
        revision.pods[name] = pod
        await self._pods_api.create(manifest)
        self._spawn(self._bring_up(revision, pod))

    async def _bring_up(self, revision: EmulatedRevision, pod: EmulatedPod) -> None:
        if self.pod_status is not None:
            await self._tell(pod, self.pod_status)
            return
        await self._schedule(pod)
        await asyncio.sleep(self.start_seconds)
        launch = self.launch or fake_functions(lambda name: self._spawn(self._exited(name)))
        running = await launch(pod.name, await self._environment(revision))
        if pod.deleting:
            await running.kill()
            return
        pod.running = running
        status = {
            "phase": "Running",
            "podIP": running.host,
            "podIPs": [{"ip": running.host}],
            "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")],
            "containerStatuses": [
                {
                    "name": "function",
                    "ready": True,
                    "restartCount": 0,
                    "image": "none",
                    "imageID": "",
                    "state": {"running": {"startedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}},
                }
            ],
        }
        await self._tell(pod, status)
        pod.ready = True

    async def _schedule(self, pod: EmulatedPod) -> None:
        """Wait until the node has memory for one more pod."""
        message = "0/1 nodes are available: 1 Insufficient memory."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        told = False
        while self.memory is not None and sum(each.scheduled for each in self.pods) >= self.memory and not pod.deleting:
            if not told:
                await self._tell(pod, {"phase": "Pending", "conditions": [condition]})
                told = True
            await asyncio.sleep(_TICK_SECONDS)
        pod.scheduled = True
        if told:
            await self._tell(pod, {"conditions": [{"type": "PodScheduled", "status": "True"}]})

    async def _tell(self, pod: EmulatedPod, status: dict[str, Any]) -> None:
        with contextlib.suppress(NotFoundError):
            await self._pods_api.patch(pod.namespace, pod.name, {"status": status}, subresource="status")

    async def _environment(self, revision: EmulatedRevision) -> dict[str, str]:
        (container,) = revision.template["spec"]["containers"]
        environment = {}
        for variable in container["env"]:
            value = variable.get("value")
            if value is None:
                reference = variable["valueFrom"]["secretKeyRef"]
                secret = await self.client.resource(SECRETS).get(revision.namespace, reference["name"])
                value = base64.b64decode(secret.data[reference["key"]]).decode()
            environment[variable["name"]] = value
        return environment

    async def _exited(self, name: str) -> None:
        """A process died: its container is started anew, and the pod stays."""
        pod = self.pod(name)
        pod.ready = False
        assert pod.running is not None
        await self._tell(pod, CRASHED)
        await pod.running.kill()

    async def _watch_pods(self) -> None:
        async for event in self._pods_api.watch(label_selector=REVISION_LABEL):
            if event.object is None:
                continue
            metadata = event.object.metadata
            revision = self.revisions.get((metadata.namespace, metadata.labels[REVISION_LABEL]))
            pod = revision.pods.get(metadata.name) if revision is not None else None
            if revision is None or pod is None:
                continue
            pod.cost = int(metadata.annotations.get(DELETION_COST, "0"))
            if event.type == "deleted":
                pod.deleting = True
                revision.pods.pop(pod.name)
                if pod.running is not None:
                    self._spawn(pod.running.kill())
            elif metadata.deletion_timestamp is not None and not pod.ending:
                pod.deleting = pod.ending = True
                grace = metadata.model_dump(by_alias=True).get("deletionGracePeriodSeconds", 30)
                self._spawn(self._end(pod, grace))

    async def _end(self, pod: EmulatedPod, grace: int) -> None:
        """What the kubelet does with a pod that is deleted."""
        if pod.running is not None:
            if grace < _KILLED_WITHIN_SECONDS:
                await pod.running.kill()
            else:
                await asyncio.sleep(self.terminating_seconds)
                await pod.running.terminate()
                await asyncio.sleep(self.lingering_seconds)
        with contextlib.suppress(NotFoundError):
            await self._pods_api.delete(pod.namespace, pod.name, grace_period_seconds=0)

    # --- requests ---

    async def _route(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.host}{request.path}")
        if self.down:
            return web.Response(status=503, text="no healthy upstream")
        if self.refuse:
            status, text = self.refuse.pop(0)
            return web.Response(status=status, text=text)
        service, namespace, *_ = request.host.split(".")
        revisions = [
            revision
            for revision in self.revisions.values()
            if (revision.service, revision.namespace) == (service, namespace)
        ]
        if not revisions:
            return web.Response(status=404, text="no such service")
        async with self._a_free_pod(revisions[-1]) as pod:
            assert pod.running is not None
            return await pass_on(request, self._session, f"http://{pod.running.host}:{pod.running.port}")

    @contextlib.asynccontextmanager
    async def _a_free_pod(self, revision: EmulatedRevision) -> AsyncIterator[EmulatedPod]:
        """The activator: one request a pod, as far as it can tell; the others wait."""
        revision.awake = True
        while not (free := [pod for pod in revision.active if pod.ready and pod.requests == 0]):
            revision.poked_until = time.monotonic() + _WINDOW_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
        pod = random.choice(free)
        pod.requests += 1
        try:
            yield pod
        finally:
            pod.requests -= 1

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
