"""The time for which instances that have nothing to do are kept."""

import math
from collections.abc import Sequence

WINDOW = 32
"""Number of the newest durations that count."""
_SLACK = 1.25
"""Factor by which an instance is kept longer than the gap to bridge, because gaps vary."""


def kept_for(gap_seconds: float, switch_seconds: float) -> float:
    """Return the seconds to keep an instance without work whose next work is expected in `gap_seconds`; 0 for none.

    It is kept if its idle time costs no more than a switch. If the work is late, it is kept for the cost of a switch
    beyond that, which by the ski-rental rule costs at most twice the best in hindsight.

    Args:
        gap_seconds: seconds until its next work.
        switch_seconds: instance-seconds of draining and of a start-up; a delay that it causes may be charged in it.
    """
    return gap_seconds + switch_seconds if gap_seconds <= switch_seconds else 0.0


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
