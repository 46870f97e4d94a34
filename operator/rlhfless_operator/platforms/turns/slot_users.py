"""The interface between the slots of a namespace and the jobs whose pods take turns on them."""

from collections.abc import Callable, Sequence
from typing import Protocol

from rlhfless_functions.api import Stage
from rlhfless_operator.planner.pools.host_memory import NodeMate
from rlhfless_operator.platforms.turns.slot_division import ClaimsReview


class SlotUser(Protocol):
    """A job whose pods take turns."""

    @property
    def job(self) -> str:
        """Unique id of the job."""

    def free(self, stage: Stage) -> Sequence[str]:
        """Return the pods of a stage that are awake and have no task."""

    def asleep(self, stage: Stage) -> Sequence[str]:
        """Return the pods of a stage that sleep and could take a task."""

    def idle(self) -> Sequence[str]:
        """Return the pods of any stage that are awake and have no task."""

    def leaving(self) -> Sequence[str]:
        """Return the pods of any stage that are releasing their slots."""

    def take(self, pod: str) -> None:
        """Assign a task to a pod."""

    def put_to_sleep(self, pod: str) -> None:
        """Put a pod to sleep, because another pod needs its slots."""

    def could_start(self, stage: Stage) -> float | None:
        """Return the seconds that one more pod of a stage takes to start; None if the stage can't have one more now."""

    def start(self, stage: Stage) -> None:
        """Start one more pod of a stage, because its tasks have waited long while slots were unused."""

    def reviewed(self, claims: ClaimsReview) -> None:
        """Handle a review of the claims."""

    def node_mates(self) -> Sequence[NodeMate]:
        """Return all pods, as the other pods on their nodes see them."""

    def end(self, pod: str) -> None:
        """End a pod without a task, to free its node's memory for another one."""

    def trouble(self, problem: str) -> None:
        """Report a problem of the slots; an empty text ends it."""


Hope = Callable[[], str | None]
"""Returns None if a task should keep waiting for a pod, else the reason to stop."""
