"""How far apart a job's steps are in the long run, when rollouts may go ahead of the learner. Pure.

Every step's rollout is cut into the same shares here, and the instances give them out as an asynchronous job does
(`training/instance_queue.py`): as many instances as a step has shares, and shares of an earlier step first. Groups are
prepared beside generation, those of an earlier step first. One learner takes the steps in their order. A step's shares
begin once weights of at most `max_staleness` versions behind are there (`training/staleness.py`); 0 is a synchronous
job.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = 64
"""Steps that are gone through. The second half of them counts, when the beginning is forgotten."""


@dataclass(frozen=True)
class Period:
    """What a step takes in the long run."""

    seconds: float
    """Between two steps."""
    generation_busy: float
    """Part of their time in which instances of generation work."""
    learning_busy: float
    """Part of its time in which the learner works."""
    staleness: float
    """Mean of the versions between the weights that sampled a step and those that it starts from."""


def least_period(shares: Sequence[float], learning: float, max_staleness: int, *, preparation: float = 0.0) -> float:
    """Seconds between two steps that no order of the work goes below, in the mean over many steps.

    The learner takes `learning` a step, and the instances that prepare `preparation`. The instances that generate, of
    which there are as many as shares, work for the sum of the shares. And a step waits for the weights of the one
    `max_staleness` + 1 before, and then takes its longest share and learning.

    Args:
        shares: seconds of work of each.
        learning: seconds of a step's learning, until its weights are there.
        preparation: seconds in which the instances that prepare work off a step's groups.
    """
    longest = max(shares) + learning
    return max(learning, preparation, math.fsum(shares) / len(shares), longest / (max_staleness + 1))


def period(shares: Sequence[float], learning: float, max_staleness: int, *, preparation: float = 0.0) -> Period:
    """What a step takes where every step has these shares.

    Args:
        shares: seconds of work of each, at least one.
        learning: seconds of a step's learning, until its weights are there.
        preparation: seconds in which the instances that prepare work off a step's groups, most of which are there
            early.
    """
    free = [0.0] * len(shares)
    done = [0.0]
    prepared = 0.0
    stalenesses = []
    for step in range(1, _STEPS + 1):
        ready = done[max(0, step - 1 - max_staleness)]
        begun = math.inf
        ends = []
        for share in sorted(shares, reverse=True):
            start = max(heapq.heappop(free), ready)
            begun = min(begun, start)
            ends.append(start + share)
            heapq.heappush(free, start + share)
        newest = sum(end <= begun for end in done) - 1
        stalenesses.append(step - 1 - newest)
        prepared = max(max(prepared, begun) + preparation, *ends)
        done.append(max(done[-1], prepared) + learning)
    half = _STEPS // 2
    seconds = (done[-1] - done[half]) / (_STEPS - half)
    return Period(
        seconds=seconds,
        generation_busy=math.fsum(shares) / (len(shares) * seconds) if seconds else 0.0,
        learning_busy=learning / seconds if seconds else 0.0,
        staleness=math.fsum(stalenesses[half:]) / (_STEPS - half),
    )
