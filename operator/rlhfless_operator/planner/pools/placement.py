"""The placement of a job's instances: preferences for near nodes, and the distances that came of them.

The new weights go from the learner to every generation instance in each step, so instances prefer nodes near their
job's learner. Among equal nodes they prefer those with generation instances of the same job: then whole nodes become
free when a job lets go of its instances. Both are preferences: an instance that finds no room near the others goes
where there is room. This is the locality of RLHFless (arXiv 2602.22718), as far as a scheduler of pods can express it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

HOSTNAME = "kubernetes.io/hostname"
"""Label of a node that holds the node's name."""
TOPOLOGY_KEYS = (HOSTNAME, "topology.kubernetes.io/zone")
"""Labels of nodes that every cluster of several zones has, the nearest domain first."""

Distance = Literal["same_node", "same_zone", "across_zones", "other_node"]
"""Distance between two instances. `same_zone`: on two nodes that share a farther domain. `other_node`: on two nodes
whose zones are not both known."""
DISTANCES: tuple[Distance, ...] = get_args(Distance)

_NEAR_LEARNER = 100
"""Highest weight that Kubernetes takes."""
_NEAR_GENERATION = 10
"""Weight of each generation instance of a node. It counts twice, because those instances prefer the new one too: six
of them outweigh the learner."""
_FALL = 4
"""Factor by which a domain counts less than the next nearer one. Kubernetes compares a node's sum with the best one:
the more a zone counts, the less a node in it does."""


@dataclass(frozen=True, slots=True)
class Preference:
    """The preference for a domain with instances of one stage of the same job."""

    stage: str
    """One of the three stages of a step."""
    topology_key: str
    """Label of nodes; its value names the domain."""
    weight: int
    """From 1 to 100; it counts once for each instance that is there."""


def preferences(stage: str, topology_keys: Sequence[str]) -> list[Preference]:
    """Return the preferences of an instance of a stage.

    Args:
        stage: one of the three stages of a step.
        topology_keys: labels of nodes, the nearest domain first.
    """
    weights = {"learning": _NEAR_LEARNER, "generation": _NEAR_GENERATION}
    if stage == "learning":
        # A job has one learner at a time. Two of them meet only while one makes way for the other.
        del weights["learning"]
    return [
        Preference(other, key, max(1, weight // _FALL**position))
        for other, weight in weights.items()
        for position, key in enumerate(topology_keys)
    ]


def distance(one: Sequence[str], other: Sequence[str]) -> Distance | None:
    """Return the distance between two places; None if one of them is unknown.

    Args:
        one: name of the node, then its domains, the nearest first; an unknown domain is empty.
        other: the same of the other place.
    """
    if not one or not other or not one[0] or not other[0]:
        return None
    if one[0] == other[0]:
        return "same_node"
    domains = list(zip(one[1:], other[1:], strict=False))
    if any(first and first == second for first, second in domains):
        return "same_zone"
    return "across_zones" if domains and all(domains[-1]) else "other_node"
