"""The handlers that kopf calls. They pass each job to its supervisor."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import kopf

from rlhfless_operator.controller.conditions import Transition
from rlhfless_operator.controller.context import OperatorContext
from rlhfless_operator.controller.job import Supervisor
from rlhfless_operator.controller.logs import NOTICE
from rlhfless_operator.controller.resource import JobResource, next_action
from rlhfless_operator.formatting import excerpt
from rlhfless_operator.job.generated.crd import GROUP, PLURAL, VERSION
from rlhfless_operator.job.resource_status import read_resource_status

FINALIZER = "rlhfless.io/driver"
"""Delays a job's deletion until its driver has released everything."""
STALE_SECONDS = 120.0
"""A supervisor that is silent for longer is named by the liveness endpoint, in seconds."""


_LONGEST_EVENT = 1000


class EventGate:
    """Limits the events of a job: a few of each reason at once, and then one a pause."""

    _AT_ONCE = 3
    _PAUSE_SECONDS = 300.0

    def __init__(self) -> None:
        self._free_from: dict[str, float] = {}

    def lets(self, reason: str, now: float) -> bool:
        """Return whether an event of this reason is posted now; `now` is in monotonic seconds."""
        earliest = max(self._free_from.get(reason, 0.0), now - (self._AT_ONCE - 1) * self._PAUSE_SECONDS)
        if earliest > now:
            return False
        self._free_from[reason] = earliest + self._PAUSE_SECONDS
        return True


class Handlers:
    """The handlers of one operator.

    Args:
        context: the context that its supervisors share.
    """

    def __init__(self, context: OperatorContext) -> None:
        self._context = context
        self._supervisors: dict[str, Supervisor] = {}

    def register(self, registry: kopf.OperatorRegistry) -> None:
        """Register the handlers with kopf."""
        kopf.on.event(GROUP, VERSION, PLURAL, id=NOTICE, registry=registry)(self._on_event)
        kopf.daemon(
            GROUP,
            VERSION,
            PLURAL,
            id="driver",
            registry=registry,
            when=_wants_attention,
            cancellation_timeout=60.0,
            # An exception from a supervisor is a bug in it: log it, and start again.
            backoff=30.0,
        )(self._supervise)
        kopf.on.login(registry=registry, errors=kopf.ErrorsMode.PERMANENT)(kopf.login_with_service_account)
        kopf.on.login(registry=registry, errors=kopf.ErrorsMode.PERMANENT)(kopf.login_with_kubeconfig)

    def silent(self) -> list[str]:
        """Return the jobs whose supervisors have been silent for long."""
        now = time.monotonic()
        return [
            f"{supervisor.resource.namespace}/{supervisor.resource.name}"
            for supervisor in self._supervisors.values()
            if now - supervisor.heartbeat > STALE_SECONDS
        ]

    async def _supervise(self, body: kopf.Body, stopped: kopf.DaemonStopped, **_: Any) -> None:
        def post(transition: Transition) -> None:
            if gate.lets(str(transition.reason), time.monotonic()):
                kind = "Normal" if transition.good else "Warning"
                message = excerpt(transition.message, _LONGEST_EVENT)
                kopf.event(body, type=kind, reason=str(transition.reason), message=message)

        gate = EventGate()

        supervisor = Supervisor(self._context, body, stopped, post)
        uid = body["metadata"]["uid"]
        self._supervisors[uid] = supervisor
        stopping = asyncio.create_task(_notice_when(stopped, supervisor))
        try:
            await supervisor.run()
        finally:
            stopping.cancel()
            if self._supervisors.get(uid) is supervisor:
                del self._supervisors[uid]

    async def _on_event(self, event: Mapping[str, Any], body: kopf.Body, **_: Any) -> None:
        # kopf keeps every job's last document. This part is a third of it and is never read.
        event["object"]["metadata"].pop("managedFields", None)
        metadata = body["metadata"]
        if event.get("type") == "DELETED":
            self._context.metrics.forget(metadata["namespace"], metadata["name"])
        else:
            status = body.get("status") or {}
            self._context.metrics.show_phase(metadata["namespace"], metadata["name"], status.get("phase", "Pending"))
        if (supervisor := self._supervisors.get(metadata["uid"])) is not None:
            supervisor.notice()


def _wants_attention(body: kopf.Body, **_: Any) -> bool:
    return next_action(JobResource.of(body), read_resource_status(body.get("status"))) != "none"


async def _notice_when(stopped: kopf.DaemonStopped, supervisor: Supervisor) -> None:
    await stopped.wait()
    supervisor.notice()
