"""The distance between generation and the learner. Pure.

Step v makes version v of the weights, and version 0 is the model as given. Step n starts from version n − 1. So if
step n learns from groups that version v sampled, their staleness is n − 1 − v. It is 0 in a synchronous job. If several
versions sampled a group, v is the oldest of them.
"""

import math

SURPRISE = 1.5
"""Factor by which a rollout may take longer than usual before the learner waits for it."""


def staleness(step: int, version: int) -> int:
    """Return the number of versions between the weights that sampled a group and those that the step starts from."""
    return step - 1 - version


def oldest_version(step: int, most: int) -> int:
    """Return the oldest version that may sample a step's groups: its generation begins once that version is there.

    Args:
        step: from 1.
        most: the greatest staleness that is allowed.
    """
    return max(0, step - 1 - most)


def last_step_begun(done: int, most: int) -> int:
    """Return the last step whose generation can have begun when `done` steps are done."""
    return done + 1 + most


def steps_ahead(most: int, rollout_seconds: float, learning_seconds: float) -> int:
    """Return how many steps generation should be ahead of the learner: as few as keep it from waiting, at least one.

    A rollout that begins `a` steps ahead is needed after the learning of `a` steps. To begin it earlier makes its
    weights older and the learner no faster.

    Args:
        most: the greatest staleness that is allowed.
        rollout_seconds: time of a rollout; 0 if unknown.
        learning_seconds: time of a step's learning; 0 if unknown.
    """
    if not rollout_seconds or not learning_seconds:
        return most
    return min(most, max(1, math.ceil(SURPRISE * rollout_seconds / learning_seconds)))
