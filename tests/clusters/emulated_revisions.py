"""The Revisions of an emulated Knative and their pods, as the emulation keeps them."""

from dataclasses import dataclass, field
from typing import Any

from tests.clusters.running_functions import RunningFunction

CRASHED: dict[str, Any] = {
    "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
    "containerStatuses": [
        {
            "name": "function",
            "ready": False,
            "restartCount": 1,
            "image": "none",
            "imageID": "",
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
            "lastState": {"terminated": {"reason": "Error", "exitCode": 1}},
        }
    ],
}
"""Status of a pod whose process has died."""


@dataclass
class EmulatedPod:
    """One pod."""

    name: str
    namespace: str
    revision: str
    running: RunningFunction | None = None
    ready: bool = False
    scheduled: bool = False
    """Whether a node has memory for it."""
    deleting: bool = False
    requests: int = 0
    """Under way to or in it, as the activator counts them."""
    cost: int = 0
    number: int = 0
    ending: bool = False
    """Whether its deletion has been taken note of."""


@dataclass
class EmulatedRevision:
    """One Revision."""

    name: str
    namespace: str
    service: str
    template: dict[str, Any]
    least: int = 0
    most: int = 0
    poked_until: float = 0.0
    """Until when one pod is wanted because a request has waited at none."""
    awake: bool = True
    """Whether the autoscaler looks at the bounds."""
    pods: dict[str, EmulatedPod] = field(default_factory=dict)

    @property
    def active(self) -> list[EmulatedPod]:
        return [pod for pod in self.pods.values() if not pod.deleting]
