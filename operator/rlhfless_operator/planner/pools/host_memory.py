"""The choice of a pod without a task to end, if its node has too little memory for one more pod."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

NodeMateState = Literal["lacks memory", "resting", "ending", "other"]
"""`lacks memory`: no node has enough for it. `resting`: it has no task, asleep or awake. `ending`: it was deleted
and is still there."""


@dataclass(frozen=True)
class NodeMate:
    """A pod that uses slots in turns. Pods that name a claim together are on one node."""

    name: str
    job: str
    """Unique id of its job."""
    stage: str
    claims: frozenset[str]
    """All claims that it names."""
    state: NodeMateState
    since: float = 0.0
    """Moment since which it has had no task."""
    priority: int = 0
    """Priority of its job."""


def pod_to_end(pods: Sequence[NodeMate], waiting: Collection[tuple[str, str]]) -> str | None:
    """Return the pod to end for a pod that lacks memory while a task waits for it; None if there is none, or if one is
    ending already.

    A pod never ends while a task of its stage waits. Of the others, a pod of the job with the lowest priority ends
    first. Within a priority a learner ends last, because it would load its state again. Then the pod ends that has
    been without a task for longest.

    Args:
        waiting: job and stage of the tasks that wait.
    """
    for starved in pods:
        if starved.state != "lacks memory" or (starved.job, starved.stage) not in waiting:
            continue
        beside = [each for each in pods if each.claims & starved.claims and each is not starved]
        if any(each.state == "ending" for each in beside):
            continue
        able = [each for each in beside if each.state == "resting" and (each.job, each.stage) not in waiting]
        if able:
            return min(able, key=lambda each: (each.priority, each.stage == "learning", each.since, each.name)).name
    return None
