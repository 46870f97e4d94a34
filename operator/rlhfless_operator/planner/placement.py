"""Hints to a platform: which actors go near the learner, and which share a node.

The actors that end last are the last to be free when new weights come, so they go where the weights come from: their
transfer is the shortest. Actors that end together share a node, so that whole nodes become free, one after another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the cluster describes it."""

    name: str
    free_gpus: int
    distance: int = 0
    """Hops from the learner: 0 is the learner's own node, 1 the same rack."""


@dataclass(frozen=True)
class Placement:
    """Where actors should go; a platform may do otherwise."""

    nodes: Mapping[str, str]
    """Node of each actor that has one."""
    unplaced: tuple[str, ...]
    """Actors for which there is no free node now."""


def place(expected_seconds: Mapping[str, float], nodes: Sequence[Node], *, gpus_per_actor: int) -> Placement:
    """Assign actors to nodes: the last to end nearest to the learner, neighbours in end time together.

    An instance does not span nodes. Of nodes at the same distance the one with the fewest free GPUs that suffice is
    filled first, which leaves whole nodes free.

    Raises:
        ValueError: for an actor without GPUs, or one that fits no node at all.
    """
    if gpus_per_actor < 1:
        raise ValueError(f"gpus_per_actor is {gpus_per_actor}: an actor needs at least 1")
    largest = max((node.free_gpus for node in nodes), default=0)
    if nodes and gpus_per_actor > largest:
        raise ValueError(
            f"gpus_per_actor is {gpus_per_actor}, and no node has more than {largest} free:"
            f" an instance does not span nodes, so use at most {largest}"
        )
    slots = [
        node.name
        for node in sorted(nodes, key=lambda each: (each.distance, each.free_gpus, each.name))
        for _ in range(node.free_gpus // gpus_per_actor)
    ]
    ranked = sorted(expected_seconds, key=lambda actor: (-expected_seconds[actor], actor))
    return Placement(dict(zip(ranked, slots, strict=False)), tuple(ranked[len(slots) :]))
