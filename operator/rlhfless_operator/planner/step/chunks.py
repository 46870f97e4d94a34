"""The number of groups that an instance prepares at a time."""

CHUNKS_PER_STEP = 6
"""Approximate number of chunks of a rollout's groups. Fewer chunks overlap less, and more cost more round trips."""


def least_chunk(left: int, at_once: int) -> int:
    """Return the fewest groups that are prepared at a time while more are to come; see `chunk_size`."""
    return max(1, left // (CHUNKS_PER_STEP * at_once))


def before_last_chunk(seconds: float) -> float:
    """Return the part of a batch's learning that a learner can do before the last groups are prepared."""
    return seconds * (1 - 1 / CHUNKS_PER_STEP)


def chunk_size(complete: int, left: int, at_once: int, *, ended: bool) -> int:
    """Return how many complete groups the next instance prepares; 0 if it should wait for more.

    Args:
        complete: number of groups that wait.
        left: number of groups that are not prepared yet; all of the rollout's if no step takes single groups.
        at_once: most chunks that are prepared at a time.
        ended: whether all groups are complete.
    """
    least = least_chunk(left, at_once)
    if complete < least and not ended:
        return 0
    return min(complete, max(least, -(-complete // at_once)))
