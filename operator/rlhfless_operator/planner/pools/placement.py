"""Which instances of a job want to be near which, and how far from each other they came to be.

The new weights go from the learner to every generation instance in each step, so instances want to be near the learner
of their job. What is left of the choice goes to nodes that have generation instances of the same job: then whole nodes
become free when a job lets go of its instances. Both are preferences. An instance that finds no room near the others
goes where there is room. It is the locality of RLHFless (arXiv 2602.22718), as a scheduler of pods can have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

HOSTNAME = "kubernetes.io/hostname"
"""Label of a node with its own name."""
TOPOLOGY_KEYS = (HOSTNAME, "topology.kubernetes.io/zone")
"""Labels of nodes that every cluster of several zones has, the nearest domain first."""

Distance = Literal["same_node", "same_zone", "across_zones", "other_node"]
"""How far two instances are from each other. `same_zone`: on two nodes that share a farther domain. `other_node`: on
two nodes whose zones are not both known."""
DISTANCES: tuple[Distance, ...] = get_args(Distance)

_NEAR_LEARNER = 100
"""The most that Kubernetes takes as a weight."""
_NEAR_GENERATION = 10
"""It counts for each generation instance of a node, and twice, because those prefer the new one too: six of them
outweigh the learner."""
_FALL = 4
"""A domain counts this many times less than the nearer one. Kubernetes compares what a node has with what the best one
has: the more a zone counts, the less a node in it does."""


@dataclass(frozen=True, slots=True)
class Preference:
    """To be in the same domain as the instances of a stage of the same job."""

    stage: str
    """One of the three stages of a step."""
    topology_key: str
    """Label of nodes whose value names the domain."""
    weight: int
    """From 1 to 100; it counts once for each instance that is there."""


def preferences(stage: str, topology_keys: Sequence[str]) -> list[Preference]:
    """What an instance of a stage prefers.

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
    """How far two places are from each other; None where one of them is not known.

    Args:
        one: name of the node, then the domains that it is in, the nearest first; a domain that is not known is empty.
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
