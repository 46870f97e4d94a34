"""The operator: connects settings, clients, handlers, metrics and leader election."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import kopf
from fsspec.asyn import get_loop
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from rlhfless_operator.controller.context import MakePlatform, OperatorContext, Pacing
from rlhfless_operator.controller.endpoints import serve_admission, serve_liveness, serve_metrics
from rlhfless_operator.controller.handlers import FINALIZER, Handlers
from rlhfless_operator.controller.leadership import Election, lead
from rlhfless_operator.controller.pools import Pools
from rlhfless_operator.controller.prometheus import OperatorMetrics
from rlhfless_operator.controller.queueing import Queues
from rlhfless_operator.controller.resource import JOBS
from rlhfless_operator.controller.room import Room
from rlhfless_operator.controller.slot_admission import SlotAdmission
from rlhfless_operator.controller.tenancy.threads import JobThreads, say_what_the_machine_lacks
from rlhfless_operator.job.reading.elsewhere import reading_elsewhere
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.cluster_settings import ClusterSettings

_DOMAIN = "rlhfless.io"
_THREADS = 32
"""Threads for calls that block and are on behalf of no job; jobs have their own."""
_DEEPEST_CALLS = 50_000
"""Two a level of the deepest JSON that an API server takes, 10,000 levels, and more."""
_CONNECTIONS = 20
"""Connections to the API server."""
_CLOSING_SECONDS = 30.0
"""A little longer than a driver may take to release everything, in seconds."""
_OUTAGE_SECONDS = (1, 1, 2, 3, 5, 8, 13, 21, *[30] * 20)
"""Pauses while the API server does not answer: ten minutes in total, then the operator ends and is restarted."""

OpenPlatforms = Callable[[ApiClient, ClusterSettings], AbstractAsyncContextManager[MakePlatform]]
"""Opens the resources that the platforms of all jobs share."""


@dataclass
class Operator:
    """One operator process.

    Attributes:
        metrics_port: port of its metrics, once it runs.
        liveness_port: port of its liveness probe, once it runs.
        admission_port: port of its webhooks, once it runs; None if it serves none.
    """

    settings: ClusterSettings
    open_platforms: OpenPlatforms
    election: Election | None = None
    pacing: Pacing = field(default_factory=Pacing)
    metrics_port: int | None = None
    liveness_port: int | None = None
    admission_port: int | None = None

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Operate until SIGTERM or SIGINT, or until `stop` is set."""
        # One document that is nested deeper than Python's limit would end the watch of all of them.
        sys.setrecursionlimit(max(sys.getrecursionlimit(), _DEEPEST_CALLS))
        stop = stop or asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            # PID 1 of a container ignores signals that it does not handle, also while it waits to lead.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        identity = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        asyncio.get_running_loop().set_default_executor(JobThreads(_THREADS))
        say_what_the_machine_lacks()
        # Its thread must not be one that a job's thread has started, and that is as confined.
        get_loop()
        metrics = OperatorMetrics()
        with reading_elsewhere():
            await self._run(stop, identity, metrics)

    async def _run(self, stop: asyncio.Event, identity: str, metrics: OperatorMetrics) -> None:
        async with connect() as client, self.open_platforms(client, self.settings) as make_platform:
            knative = KnativeClient(client, field_manager="rlhfless", on_request=metrics.requested)
            impatient = KnativeClient(client, field_manager="rlhfless", patience=0, on_request=metrics.requested)
            context = OperatorContext(
                jobs=impatient.resource(JOBS),
                make_platform=make_platform,
                metrics=metrics,
                identity=identity,
                files=self.settings.files,
                artifacts=self.settings.artifacts,
                queues=Queues(knative, self.settings),
                room=Room(knative, self.settings),
                pools=Pools(self.settings),
                settings=self.settings,
                pacing=self.pacing,
            )
            handlers = Handlers(context)
            async with (
                serve_admission(
                    self.settings.admission_port,
                    Path(self.settings.admission_certificate),
                    self.settings.admission_grace_seconds,
                    SlotAdmission(knative) if self.settings.has_slots else None,
                    topology_keys=self.settings.topology_keys,
                    clients=Path(clients) if (clients := self.settings.admission_clients) else None,
                ) as self.admission_port,
                # Serve metrics last: a replica with metrics counts as ready.
                serve_metrics(metrics, self.settings.metrics_port) as self.metrics_port,
                serve_liveness(handlers.silent, self.settings.liveness_port) as self.liveness_port,
            ):
                if self.election is None:
                    await self._operate(handlers, stop)
                else:
                    await lead(client, self.election, identity, lambda lost: self._operate(handlers, lost, stop), stop)

    async def _operate(self, handlers: Handlers, *stops: asyncio.Event) -> None:
        registry = kopf.OperatorRegistry()
        handlers.register(registry)
        ends = [asyncio.create_task(stop.wait()) for stop in stops]
        ended = asyncio.get_running_loop().create_future()
        for end in ends:
            end.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
        try:
            await kopf.operator(
                registry=registry,
                settings=kopf_settings(),
                clusterwide=not self.settings.namespaces,
                namespaces=self.settings.namespaces,
                standalone=True,
                stop_flag=ended,
            )
        finally:
            for end in ends:
                end.cancel()


def kopf_settings() -> kopf.OperatorSettings:
    """Return the settings of kopf."""
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=_DOMAIN)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=_DOMAIN)
    settings.posting.reporting_component = "rlhfless"
    settings.posting.reporting_instance = socket.gethostname()
    settings.posting.event_name_prefix = "rlhfless-"
    # It reads neither CustomResourceDefinitions nor Namespaces, and needs no permission for them.
    settings.scanning.disabled = True
    settings.background.instant_exit_timeout = _CLOSING_SECONDS
    settings.networking.error_backoffs = _OUTAGE_SECONDS
    return settings


@asynccontextmanager
async def connect() -> AsyncIterator[ApiClient]:
    """Yield a client of the cluster in KUBECONFIG, or else of the one that this process runs in."""
    configuration = Configuration()
    # It warns of a kubeconfig that is not there, and then raises an error that says so too.
    logging.getLogger("kubernetes.aio.config").setLevel(logging.ERROR)
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig or not Path(config.incluster_config.SERVICE_TOKEN_FILENAME).exists():
        await config.load_kube_config(kubeconfig, client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = _CONNECTIONS
    async with ApiClient(configuration) as client:
        yield client
