"""When to wake instances before they are needed, and how long to keep one that has nothing to do."""

import math
from collections.abc import Sequence

WINDOW = 32
"""Newest durations that count."""
_SLACK = 1.25
"""How much longer an instance is kept than the gap that is to be bridged, as no gap is quite like another."""


def wake_time(
    durations: Sequence[float],
    startup_seconds: float,
    *,
    instances: int,
    late_price: float,
) -> float:
    """Return when to wake `instances` instances, in seconds after a stage began whose earlier durations are known.

    An instance that is ready too early idles, and one that is too late holds everything up: ready at R, the cost is
    instances · (D − R) or late_price · (R − D). Its mean over the durations D is least where the share of durations
    below R is instances / (instances + late_price), the newsvendor's quantile. The paper's rule, the shortest duration
    and a buffer, is its limit where being late is dear.

    Args:
        durations: seconds of the running stage in earlier steps, oldest first; the newest `WINDOW` count.
        startup_seconds: from asking to ready.
        late_price: instance-seconds that a second of delay is worth.

    Returns:
        0, at once, while nothing is known.
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
    """How long an instance without work is kept before it is released, in seconds.

    Keeping costs the idle time. Releasing costs a switch: the time until the instance is gone, and a start-up at the
    next use. Over the gaps between uses seen so far, the best limit k has the least Σ min(gap, k) + switch · [gap > k].
    It is a gap that was seen. The next one like it may be a little longer, and would pay for both: the limit is a
    quarter longer, which costs at most a quarter more. Of what is longer than all gaps seen nothing is known: then an
    instance is kept for the cost of a switch, which never costs more than twice the best in hindsight (the ski-rental
    rule).

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
