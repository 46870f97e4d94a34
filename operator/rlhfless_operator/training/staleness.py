"""How far generation may be ahead of the learner. Pure.

Version v of the weights is what step v makes, and 0 is the model as given. Step n starts from version n − 1. So groups
that version v sampled, and that step n learns from, have a staleness of n − 1 − v; it is 0 in a synchronous job.
"""


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
