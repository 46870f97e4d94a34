"""The choice whether instances start with the means to share prefixes (`generation.sharePrefixes: auto`)."""

from collections.abc import Sequence
from statistics import fmean

CONNECTOR_SHARE = 0.03
"""Share of generation's time that vLLM's connector takes, even if nothing is shared. Measured by
`benchmarks/generation/prefix_sharing.py`."""


def is_worth_sharing(now: bool | None, gains: Sequence[float], *, steps_left: int, change_seconds: float) -> bool:
    """Return whether the instances should be able to share.

    A change of the answer restarts all instances. So it has to gain more in the steps that are left than the restart
    takes.

    Args:
        now: the present answer; None if there is neither an answer nor an instance.
        gains: instance-seconds that sharing saves in each of the newest steps and the next one, less the time of the
            connector. Slow sharing makes none of them negative: such a step would share nothing.
        steps_left: steps of the job, the next one included.
        change_seconds: instance-seconds of starting the instances again.
    """
    gain = fmean(gains) if gains else 0.0
    if now is None:
        return gain > 0
    worth = gain > 0
    return worth if worth != now and abs(gain) * steps_left > change_seconds else now
