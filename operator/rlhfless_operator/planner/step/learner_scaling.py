"""How many instances should learn together: what a step of learning takes by their number, as measured in this run.

Learning of T tokens on n instances takes T · t(n) + r(n) seconds: t is what it takes for each token, r what it does
besides, such as publishing. Both are medians of the steps that were taken with n. The first step of a learner that
has just loaded is slower than those that follow, so the two are never mixed. A number that was not tried is forecast by
a + b/n through those that were: a is what does not become faster with more instances, b what is divided.

With one number measured, a and b are unknown, and nothing is forecast. One other number is tried then, if that can't
cost much: see `worth_trying`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

KNOWN_STEPS = 2
"""Steps of one kind with a number of instances after which what they take is known."""
MOST_STEPS_UNTIL_KNOWN = 2 * KNOWN_STEPS - 1
"""Steps with a number of instances after which it is known, whether its learners are kept between steps or not."""
MOST_LOSS = 0.05
"""Most that a trial may cost, as a share of all steps that are left."""


@dataclass(frozen=True)
class LearnerOption:
    """A number of instances, and what learning takes with it."""

    instances: int
    token_seconds: float
    """For each token of a sample, its prompt included."""
    rest_seconds: float
    """Of a step, besides: publishing the weights, and a part of what a change of the number costs."""
    idle_seconds: float
    """In which each instance is held in a step without working: started, drained, or kept."""
    measured: bool = True
    """Whether it was tried; else it is a forecast."""


@dataclass(frozen=True)
class Measured:
    """What the steps with one number of instances took; the same number of values in each."""

    token_seconds: Sequence[float]
    rest_seconds: Sequence[float]

    @property
    def known(self) -> bool:
        """Whether these are enough to judge by."""
        return len(self.token_seconds) >= KNOWN_STEPS


def to_judge_by(later: Measured, first: Measured) -> Measured:
    """The steps of one kind that a number of instances is judged by.

    Args:
        later: steps of learners that had taken a step before.
        first: first steps of learners that had just loaded, which include their warm-up. They count where learners are
            started anew for each step, as each step then pays for a warm-up.
    """
    return first if first.known and not later.known else later


def sizes(least: int, most: int) -> list[int]:
    """The numbers that come into question: the most, its half, a quarter and so on, and the least."""
    found, size = {least, most}, most
    while size > least:
        found.add(size)
        size = -(-size // 2)
    return sorted(found)


def neighbours(size: int, allowed: Sequence[int]) -> list[int]:
    """The next smaller and the next larger number, the smaller first."""
    return [each for each in reversed(allowed) if each < size][:1] + [each for each in allowed if each > size][:1]


def options(
    measured: Mapping[int, Measured],
    allowed: Sequence[int],
    now: int,
    *,
    change_seconds: float,
    idle_seconds: float,
) -> list[LearnerOption]:
    """What a plan may choose from: the numbers that are known, and their neighbours once there is a forecast for them.

    Args:
        measured: by the number of instances; the numbers in `allowed` come into question.
        allowed: numbers of instances, rising.
        now: how many learn at the moment.
        change_seconds: what a change of the number adds to a step, on average of those until the next change.
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
    """Whether to try another number, of which nothing is known, can cost at most `MOST_LOSS` of what is left.

    At worst fewer instances take as many times as long as they are fewer, and cost as much; more of them are as slow as
    before, and cost as many times as much as they are more.

    Args:
        steps: that the trial takes.
        left: steps of the job that are left.
        share: of a step's time that learning takes now.
        cost_weight: the job's λ.
    """
    slower = (1 - cost_weight) * min(1.0, share) * (now / other - 1)
    dearer = cost_weight * (other / now - 1)
    loss = max(slower, dearer)
    return steps <= left and steps * loss <= MOST_LOSS * left


def _scaled(seconds: Mapping[int, float], size: int) -> float:
    """What `size` instances take by a + b/n through what was measured, neither a nor b below zero."""
    inverse = np.array([1 / each for each in seconds])
    values = np.array(list(seconds.values()))
    slope = float(np.dot(inverse - inverse.mean(), values - values.mean()) / np.square(inverse - inverse.mean()).sum())
    slope = max(0.0, slope)
    rest = float(values.mean()) - slope * float(inverse.mean())
    if rest < 0:
        rest, slope = 0.0, float(np.dot(inverse, values) / np.dot(inverse, inverse))
    found = rest + slope / size
    return found if math.isfinite(found) else float(values.mean())
