"""How far apart a job's steps are at least, when rollouts may go ahead of the learner. Pure.

`simulator/asynchronous/long_run.py` forecasts how far apart they are.
"""

import math
from collections.abc import Sequence


def least_period(shares: Sequence[float], learning: float, max_staleness: int, *, preparation: float = 0.0) -> float:
    """Seconds between two steps that no order of the work goes below, in the mean over many steps.

    The learner takes `learning` a step, and the instances that prepare `preparation`. The instances that generate, of
    which there are as many as shares, work for the sum of the shares. And a group is learnt from at most
    `max_staleness` + 1 steps after its weights were there, so these steps take the longest share and learning.

    Args:
        shares: seconds of work of each.
        learning: seconds of a step's learning, until its weights are there.
        preparation: seconds in which the instances that prepare work off a step's groups.
    """
    longest = max(shares) + learning
    return max(learning, preparation, math.fsum(shares) / len(shares), longest / (max_staleness + 1))
