"""The number of instances that prepare the groups of an asynchronous job: the fewest that delay no other stage.

The stages of an asynchronous job work at the same time, so the slowest of them sets the pace. Preparation of W
instance-seconds a step takes W / n seconds on n instances. That should be less than the time of the slowest other
stage: with more instances some would wait, and with fewer the other stages would.
"""

import math
from dataclasses import dataclass

BUSY = 0.9
"""Largest share of their time that the instances should work. Groups come in bursts, and wait long for instances that
are never idle."""


@dataclass(frozen=True)
class PreparerChoice:
    """A number of instances, and its reason."""

    instances: int
    reason: str


def matching_preparers(work: float, *, generation: float, learning: float, least: int, most: int) -> PreparerChoice:
    """Return the fewest instances with which preparation is not the slowest stage.

    Args:
        work: instance-seconds of preparation in a step, by earlier steps; 0 if unknown.
        generation: least seconds between two steps that generation allows; 0 if unknown.
        learning: seconds of learning in a step, by earlier steps; 0 if unknown.
        least: fewest allowed instances.
        most: most allowed instances.
    """
    pace = max(generation, learning)
    if not work or not pace:
        return PreparerChoice(least, "the fewest, because the times of the stages are not known")
    slowest = f"learning takes {learning:.3g} s" if learning >= generation else f"generation takes {generation:.3g} s"
    told = f"preparation takes {work:.3g} instance-seconds a step, and {slowest}"
    needed = max(1, math.ceil(work / (BUSY * pace) - 1e-9))
    if needed > most:
        told += f", for which {needed} would be needed"
    return PreparerChoice(min(most, max(least, needed)), told)
