"""The number of instances that learn together: learning times by their number, as measured in this job.

Learning T tokens on n instances takes T · t(n) + r(n) seconds: t for each token, and r for the rest, such as
publishing. Both are medians of the steps that were taken with n. The first step of a learner that has just loaded is
slower than later steps, so the two are never mixed. A number that was not tried is forecast by a + b/n, fitted to those
that were: a is the part that more instances do not speed up, b the part that they divide.

If only one number is measured, a and b are unknown and nothing is forecast. Then one other number is tried if that
can't cost much: see `worth_trying`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

KNOWN_STEPS = 2
"""Number of steps of one kind with a number of instances, after which their time is known."""
MOST_STEPS_UNTIL_KNOWN = 2 * KNOWN_STEPS - 1
"""Number of steps with a number of instances, after which their time is known whether learners are kept between steps
or not."""
MOST_LOSS = 0.05
"""Largest cost of a trial, as a share of all steps that are left."""


@dataclass(frozen=True)
class LearnerOption:
    """A number of instances, and the time of learning with it."""

    instances: int
    token_seconds: float
    """Seconds for each token of a sample, its prompt included."""
    rest_seconds: float
    """Further seconds of a step: to publish the weights, and a part of the cost of a change of the number."""
    idle_seconds: float
    """Seconds for which each instance is held in a step without working: started, drained, or kept."""
    measured: bool = True
    """Whether it was tried; else it is a forecast."""


@dataclass(frozen=True)
class Measured:
    """Times of the steps with one number of instances; both fields have a value for each step."""

    token_seconds: Sequence[float]
    rest_seconds: Sequence[float]

    @property
    def known(self) -> bool:
        """Whether these are enough steps to judge by."""
        return len(self.token_seconds) >= KNOWN_STEPS


def to_judge_by(later: Measured, first: Measured) -> Measured:
    """Return the steps of one kind by which a number of instances is judged.

    Args:
        later: steps of learners that had taken a step before.
        first: first steps of learners that had just loaded, which include their warm-up. They count if learners are
            started anew for each step, because each step then pays for a warm-up.
    """
    return first if first.known and not later.known else later


def sizes(least: int, most: int) -> list[int]:
    """Return the candidate numbers, rising: the most, its half, a quarter and so on, and the least."""
    found, size = {least, most}, most
    while size > least:
        found.add(size)
        size = -(-size // 2)
    return sorted(found)


def neighbours(size: int, allowed: Sequence[int]) -> list[int]:
    """Return the next smaller and the next larger number, the smaller first."""
    return [each for each in reversed(allowed) if each < size][:1] + [each for each in allowed if each > size][:1]


def options(
    measured: Mapping[int, Measured], allowed: Sequence[int], now: int, *, change_seconds: float, idle_seconds: float
) -> list[LearnerOption]:
    """Return the options of a plan: the known numbers, and their neighbours once there is a forecast for them.

    Args:
        measured: by the number of instances. Those not in `allowed` are not offered.
        allowed: allowed numbers of instances, rising.
        now: number of instances that learn at the moment.
        change_seconds: mean seconds that a change of the number adds to a step, over those until the next change.
        idle_seconds: see `LearnerOption`.
    """
    known = sorted(size for size, each in measured.items() if each.known)
    if not known:
        return []
    tokens = {size: median(measured[size].token_seconds) for size in known}
    rest = {size: median(measured[size].rest_seconds) for size in known}
    tried = set(known) & set(allowed)
    near = {each for size in tried for each in neighbours(size, allowed)} - tried if len(known) > 1 else set()
    return [
        LearnerOption(
            size,
            tokens[size] if size in tried else _scaled(tokens, size),
            (rest[size] if size in tried else _scaled(rest, size)) + (change_seconds if size != now else 0.0),
            idle_seconds,
            measured=size in tried,
        )
        for size in sorted(tried | near)
    ]


def worth_trying(now: int, other: int, *, steps: int, left: int, share: float, cost_weight: float) -> bool:
    """Return whether a trial of another number, unknown so far, can cost at most `MOST_LOSS` of the steps left.

    At worst n times fewer instances take n times as long at the same cost, and n times more instances take as long as
    before at n times the cost.

    Args:
        steps: number of steps of the trial.
        left: number of steps of the job that are left.
        share: learning's share of a step's time now.
        cost_weight: the job's λ.
    """
    slower = (1 - cost_weight) * min(1.0, share) * (now / other - 1)
    dearer = cost_weight * (other / now - 1)
    loss = max(slower, dearer)
    return steps <= left and steps * loss <= MOST_LOSS * left


def _scaled(seconds: Mapping[int, float], size: int) -> float:
    """Return the seconds of `size` instances by a + b/n, fitted to the measured ones, with a and b at least 0."""
    inverse = np.array([1 / each for each in seconds])
    values = np.array(list(seconds.values()))
    slope = float(np.dot(inverse - inverse.mean(), values - values.mean()) / np.square(inverse - inverse.mean()).sum())
    slope = max(0.0, slope)
    rest = float(values.mean()) - slope * float(inverse.mean())
    if rest < 0:
        rest, slope = 0.0, float(np.dot(inverse, values) / np.dot(inverse, inverse))
    found = rest + slope / size
    return found if math.isfinite(found) else float(values.mean())
