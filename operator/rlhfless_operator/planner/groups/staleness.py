"""How far generation may be ahead of the learner. Pure.

Version v of the weights is what step v makes, and 0 is the model as given. Step n starts from version n − 1. So groups
that version v sampled, and that step n learns from, have a staleness of n − 1 − v; it is 0 in a synchronous job. Where
several versions sampled a group, v is the oldest of them.
"""

import math

SURPRISE = 1.5
"""How much longer than usual a rollout may take before the learner waits for it."""


def staleness(step: int, version: int) -> int:
    """Versions between the weights that sampled a step's groups and those that the step starts from."""
    return step - 1 - version


def oldest_version(step: int, most: int) -> int:
    """The oldest weights that may sample a step's groups: its generation begins once they are there.

    Args:
        step: from 1.
        most: the greatest staleness that is allowed.
    """
    return max(0, step - 1 - most)


def last_step_begun(done: int, most: int) -> int:
    """The last step whose generation can have begun when so many steps are done."""
    return done + 1 + most


def steps_ahead(most: int, rollout_seconds: float, learning_seconds: float) -> int:
    """How many steps generation should be ahead of the learner: as few as keep it from waiting, at least one.

    A rollout that is begun `a` steps ahead is wanted after the learning of `a` steps. To begin it any earlier than that
    takes makes its weights older, and the learner no faster.

    Args:
        most: the greatest staleness that is allowed.
        rollout_seconds: that a rollout takes; 0 where it is not known.
        learning_seconds: that learning takes; 0 where it is not known.
    """
    if not rollout_seconds or not learning_seconds:
        return most
    return min(most, max(1, math.ceil(SURPRISE * rollout_seconds / learning_seconds)))
