"""Whether instances are started with what it takes to share prefixes (`generation.sharePrefixes: auto`)."""

from collections.abc import Sequence
from statistics import fmean

CONNECTOR_SHARE = 0.03
"""Of the time of generation: what vLLM's connector takes, even if nothing is shared. Measured by
`benchmarks/generation/prefix_sharing.py`."""


def is_worth_sharing(now: bool | None, gains: Sequence[float], *, steps_left: int, change_seconds: float) -> bool:
    """Whether the instances should be able to share.

    Another answer than the present one starts all instances again. So it has to gain more in the steps that are left
    than that takes.

    Args:
        now: the present answer; None while there is none, and no instance.
        gains: instance-seconds that sharing saves in a step, less what the connector takes, of the newest steps and
            the next one. None of them is negative because sharing is slow: such a step would share nothing.
        steps_left: steps of the job, the next one included.
        change_seconds: instance-seconds of starting the instances again.
    """
    gain = fmean(gains) if gains else 0.0
    if now is None:
        return gain > 0
    worth = gain > 0
    return worth if worth != now and abs(gain) * steps_left > change_seconds else now
