"""The number of groups that an instance prepares at a time."""

import numpy as np
from numpy.typing import NDArray

CHUNKS_PER_STEP = 6
"""Approximate number of chunks of a rollout's groups. Fewer chunks overlap less, and more cost more round trips."""


def least_chunk(left: int, at_once: int) -> int:
    """Return the fewest groups that are prepared at a time while more are to come; see `chunk_size`."""
    return max(1, left // (CHUNKS_PER_STEP * at_once))


def first_chunk(completions: NDArray[np.float64], at_once: int) -> float:
    """Return the moment at which the first chunk is complete. Later ones are while earlier ones are prepared.

    Args:
        completions: [groups] moments at which each is generated.
        at_once: number of instances that prepare.
    """
    groups = least_chunk(len(completions), at_once)
    return float(np.partition(completions, groups - 1)[groups - 1])


def before_last_chunk(seconds: float) -> float:
    """Return the part of a batch's learning that a learner can do before the last groups are prepared."""
    return seconds * (1 - 1 / CHUNKS_PER_STEP)


def chunk_size(complete: int, left: int, at_once: int, *, ended: bool, followed: bool = False) -> int:
    """Return how many complete groups the next instance prepares; 0 if it should wait for more.

    A learner that follows the rollout idles while a large chunk is prepared. So then none is larger than the fewest
    groups, however many wait.

    Args:
        complete: number of groups that wait.
        left: number of groups that are not prepared yet; all of the rollout's if no step takes single groups.
        at_once: most chunks that are prepared at a time.
        ended: whether all groups are complete.
        followed: whether a learner follows, and has no other rollout's groups meanwhile.
    """
    least = least_chunk(left, at_once)
    if complete < least and not ended:
        return 0
    return min(complete, least if followed else max(least, -(-complete // at_once)))
