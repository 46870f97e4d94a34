"""Which pod without a task has to end, where its node's memory does not suffice for one more."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

NodeMateState = Literal["lacks memory", "resting", "ending", "other"]
"""`lacks memory`: no node has enough for it. `resting`: it has no task, asleep or awake. `ending`: it was deleted,
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
    """Since when it has had no task."""
    priority: int = 0
    """Of its job."""


def pod_to_end(pods: Sequence[NodeMate], waiting: Collection[tuple[str, str]]) -> str | None:
    """The pod to end for one that has no memory on its node though a task waits for it; None where there is none, or
    one is ending already.

    No pod ends whose stage has a task waiting. Of the others the first is one of the job with the lowest priority, a
    learner comes last, as it has to load its state again, and else the one goes that has had no task for longest.

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
