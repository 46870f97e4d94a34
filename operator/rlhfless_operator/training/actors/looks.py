"""The time that all rollouts of a process may take to look at their samples: one core drives many jobs."""

from collections.abc import Iterator
from contextlib import contextmanager

_SHARE = 0.2
"""Largest share of the process's time that all looks may take together."""
_rollouts: set[object] = set()
"""The rollouts that are under way in this process."""


@contextmanager
def one_more_rollout() -> Iterator[None]:
    """Count a rollout as under way."""
    rollout = object()
    _rollouts.add(rollout)
    try:
        yield
    finally:
        _rollouts.discard(rollout)


def pause_after(took: float) -> float:
    """Return the least seconds from a look until the next one of the same rollout.

    Args:
        took: seconds that the look took.
    """
    return took * max(1, len(_rollouts)) / _SHARE
