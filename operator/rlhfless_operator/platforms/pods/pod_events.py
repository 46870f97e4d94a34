"""Information about a pod that Kubernetes gives only in events, such as why its node does not prepare it."""

from datetime import datetime

from rlhfless_operator.knative import ApiError, Kind, KnativeClient, KubernetesObject

_WARNING = "Warning"


class PodEvent(KubernetesObject):
    """The parts of an event that the platform reads."""

    type: str = ""
    reason: str = ""
    message: str = ""
    event_time: datetime | None = None
    last_timestamp: datetime | None = None

    @property
    def at(self) -> float:
        """Time of its last occurrence, in seconds since 1970."""
        moment = self.last_timestamp or self.event_time or self.metadata.creation_timestamp
        return moment.timestamp() if moment is not None else 0.0


EVENTS = Kind("", "v1", "events", PodEvent)


async def newest_warning(client: KnativeClient, namespace: str, uid: str) -> str:
    """Return the newest warning about a pod, as `REASON: MESSAGE`; empty if there is none, or if it can't be read.

    Args:
        uid: uid of the pod.
    """
    try:
        found = await client.resource(EVENTS).list(namespace, field_selector=f"involvedObject.uid={uid}")
    except ApiError:
        # It only adds details to a problem that is reported anyway.
        return ""
    newest = max((event for event in found.items if event.type == _WARNING), key=lambda event: event.at, default=None)
    return f"{newest.reason}: {newest.message}" if newest is not None else ""
