"""The timing of instances: wake them before they are needed, and release those that have nothing to do."""

import math
from collections.abc import Sequence

WINDOW = 32
"""Number of the newest durations that count."""
_SLACK = 1.25
"""Factor by which an instance is kept longer than the gap to bridge, because gaps vary."""


def wake_time(durations: Sequence[float], startup_seconds: float, *, instances: int, late_price: float) -> float:
    """Return when to wake `instances` instances, in seconds after the running stage began.

    An instance that is ready too early idles. One that is ready too late delays the step. If it is ready at R and the
    stage takes D, the cost is instances · (D − R) or late_price · (R − D). The mean cost over the durations D is least
    where the share of durations below R is instances / (instances + late_price), the newsvendor's quantile. The
    paper's rule, the shortest duration and a buffer, is the limit of a high late_price.

    Args:
        durations: seconds of the running stage in earlier steps, oldest first; the newest `WINDOW` count.
        startup_seconds: from asking to ready.
        late_price: instance-seconds that a second of delay is worth.

    Returns:
        Seconds; 0 (at once) if there are no durations.
    """
    if startup_seconds < 0 or late_price < 0 or instances < 1:
        raise ValueError(
            f"startup_seconds is {startup_seconds}, late_price {late_price} and instances {instances}:"
            f" give 0 or more, 0 or more, and at least 1"
        )
    recent = sorted(durations[-WINDOW:])
    if not recent:
        return 0.0
    share = instances / (instances + late_price)
    ready = recent[max(0, math.ceil(share * len(recent)) - 1)]
    return max(0.0, ready - startup_seconds)


def keep_alive(gaps: Sequence[float], switch_seconds: float, *, longest: float = math.inf) -> float:
    """Return the seconds to keep an instance without work before it is released.

    Keeping costs the idle time. Releasing costs a switch: the time until the instance is gone, and a start-up at the
    next use. Over the gaps between uses seen so far, the best limit k has the least Σ min(gap, k) + switch · [gap > k].
    It equals one of these gaps. The next such gap may be a little longer and would pay for both. So the limit is a
    quarter longer, which costs at most a quarter more. Nothing is known beyond the longest gap. If the best limit is
    the longest gap, the instance is kept for the cost of a switch beyond it. By the ski-rental rule that costs at most
    twice the best in hindsight.

    Args:
        gaps: idle seconds between the uses of an instance; the newest `WINDOW` count.
        switch_seconds: instance-seconds of draining and of a start-up; a delay that it causes may be charged in it.
        longest: the limit that the user allows.
    """
    recent = gaps[-WINDOW:]
    if not recent:
        return min(switch_seconds, longest)
    known = max(recent)

    def cost(limit: float) -> float:
        return sum(min(gap, limit) + (switch_seconds if gap > limit else 0.0) for gap in recent)

    candidates = [0.0, *(gap for gap in recent if gap <= longest)]
    if math.isfinite(longest):
        candidates.append(longest)
    best = min(candidates, key=lambda limit: (cost(limit), limit))
    return min(known + switch_seconds if best >= known else _SLACK * best, longest)
