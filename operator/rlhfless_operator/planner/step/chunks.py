"""How many groups an instance prepares at a time."""

_CHUNKS_PER_STEP = 6
"""About how many chunks a rollout's groups are cut into: fewer overlap less, more cost more round trips."""


def chunk_size(complete: int, left: int, at_once: int, *, ended: bool) -> int:
    """How many complete groups the next instance prepares at a time; 0 while it waits for more of them.

    Args:
        complete: groups that wait.
        left: groups that are not prepared yet; all of the rollout's if no step takes single groups.
        at_once: most chunks that are prepared at a time.
        ended: whether all groups are complete.
    """
    least = max(1, left // (_CHUNKS_PER_STEP * at_once))
    if complete < least and not ended:
        return 0
    return min(complete, max(least, -(-complete // at_once)))
