"""The least seconds between two steps of a job whose rollouts may go ahead of the learner. Pure.

`simulator/asynchronous/long_run.py` forecasts the seconds that are between them.
"""

import math
from collections.abc import Sequence


def least_period(
    shares: Sequence[float], learning: float, max_staleness: int, *, preparation: float = 0.0, lag: float | None = None
) -> float:
    """Return a lower bound on the mean seconds between two steps, for any order of the work.

    The learner takes `learning` a step, and preparation takes `preparation`. Generation has one instance for each
    share, and all of them together work for the sum of the shares. A group is learnt from at most `max_staleness` + 1
    steps after its weights were there, so these steps take at least the longest share and `lag`.

    Args:
        shares: seconds of work of each share.
        learning: seconds of a step's learning, until its weights are there.
        preparation: seconds in which the preparation instances work off a step's groups.
        lag: seconds from a step's last groups until its weights are there; all of `learning` if the learner begins
            with all groups.
    """
    longest = max(shares) + (learning if lag is None else lag)
    return max(learning, preparation, math.fsum(shares) / len(shares), longest / (max_staleness + 1))
