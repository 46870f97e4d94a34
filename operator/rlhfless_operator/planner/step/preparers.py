"""How many instances should prepare the groups of an asynchronous job: the fewest that hold no other stage up.

The stages of an asynchronous job work at the same time, so the slowest of them sets the pace. Preparation of W
instance-seconds a step takes W / n seconds on n instances. That should be less than what the slowest other stage takes:
more instances would wait, and fewer would be waited for.
"""

import math
from dataclasses import dataclass

BUSY = 0.9
"""Most of their time that the instances should work. Groups come in bursts, and wait long for instances that are never
idle."""


@dataclass(frozen=True)
class PreparerChoice:
    """A number of instances, and why."""

    instances: int
    reason: str


def matching_preparers(work: float, *, generation: float, learning: float, least: int, most: int) -> PreparerChoice:
    """The fewest instances that keep preparation from being the slowest stage.

    Args:
        work: instance-seconds of preparation a step, as earlier steps took them; 0 where it is not known.
        generation: seconds between two steps that generation allows; 0 where it is not known.
        learning: seconds of learning a step, as earlier steps took them; 0 where it is not known.
        least: fewest that are allowed.
        most: most that are allowed.
    """
    pace = max(generation, learning)
    if not work or not pace:
        return PreparerChoice(least, "what preparation takes is not measured yet")
    slowest = f"learning takes {learning:.3g} s" if learning >= generation else f"generation takes {generation:.3g} s"
    told = f"preparation takes {work:.3g} instance-seconds a step, and {slowest}"
    needed = max(1, math.ceil(work / (BUSY * pace) - 1e-9))
    if needed > most:
        told += f", for which {needed} would be needed"
    return PreparerChoice(min(most, max(least, needed)), told)
