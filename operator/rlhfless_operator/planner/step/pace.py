"""The pace of a learner that takes groups as they come: when it begins, and when it lets its GPUs go while it waits.

It begins on the backlog of groups, and a forecast alone never keeps it. A late group is expected to be late by as much
again, but to end no later than the step's longest response, like a response that does not end by itself. The pace is a
pure function of the backlog and the expected groups.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.step.overlap import TrainerRun

Floats = NDArray[np.float64]

LOOK_SECONDS = 0.25
"""Seconds between two looks at the groups that have come."""
_WORTH = 3.0
"""Length of a backlog, as a multiple of a start, from which learning begins at once, even if more is expected."""
_UNKNOWN_SHARE = 0.5
"""Share of a step's groups from which a learner begins if nothing is known of their times."""


def begins_unknown(ready: int, groups: int) -> bool:
    """Return whether to ask for a learner when so many of a step's groups are prepared, and nothing is known of when
    the others come or how long it learns. From the first group on it would idle most of the time."""
    return ready >= _UNKNOWN_SHARE * groups


@dataclass(frozen=True)
class LearnerPace:
    """The decisions of one learner. All moments are in seconds into the step."""

    start_seconds: float
    """Seconds from asking for it to its working."""
    switch_seconds: float
    """Least wait for which letting go is worth its cost: an end and a start, the repeated steps, and the price of a
    step that may end later by a start."""
    last_seconds: float = math.inf
    """Moment at which the last group of all was expected; infinity if unknown."""

    def begins(self, now: float, backlog: float, expected: Floats, work: Floats) -> float:
        """Return the moment at which to ask for the learner, as known now; `now` for at once.

        A learner asked for at E − start − Σ work ends at E, the earliest possible end, and holds its GPU for the
        shortest time with that end (docs/research/planner.md, "The whole step"). A learner with a backlog of several
        starts has enough work to begin now and let go afterwards.

        Args:
            now: seconds into the step.
            backlog: seconds of work that has come.
            expected: [groups] moments at which the groups still to come were expected.
            work: [groups] seconds of each of these.
        """
        if not expected.size or backlog >= _WORTH * self.start_seconds > 0:
            return now
        moments = still_expected(now, expected, self.last_seconds)
        order = np.argsort(moments, kind="stable")
        left = np.cumsum(work[order][::-1])[::-1]
        total, end = backlog + float(left[0]), float((moments[order] + left).max())
        # Not by way of the end of a learner that begins now: by rounding, that lies after now, time and again.
        return max(now, end - self.start_seconds - total)

    def lets_go(self, now: float, expected: Floats, again: float = 0.0) -> bool:
        """Return whether a learner without work is better let go than kept waiting.

        Args:
            now: seconds into the step.
            expected: [groups] moments at which the groups still to come were expected.
            again: seconds of work that is lost with it; 0 if its gradients stay in the host's memory.
        """
        if not expected.size:
            return False
        soonest = float(still_expected(now, expected, self.last_seconds).min())
        return soonest - now > self.switch_seconds + again


def still_expected(now: float, expected: Floats, last: float = math.inf) -> Floats:
    """Return the moments at which to expect groups that have not come by now [groups].

    A late group is expected to be late by as much again, but not to come after the last of all: most likely one of its
    responses does not end by itself, and the forecast of the last group rests on such responses.

    Args:
        last: moment at which the last group of all was expected.
    """
    late = np.minimum(2 * now - expected, max(last, 2 * now - last))
    return np.where(expected > now, expected, late)


def run_paced(
    arrivals: Floats,
    expected: Floats,
    work: Floats,
    free_from: Floats,
    gpus: int,
    pace: LearnerPace,
    *,
    update_seconds: float,
) -> TrainerRun:
    """Work off groups in the order of their arrival, with a learner that begins and lets go at its pace.

    Args:
        arrivals: [groups] moments from which each group's work can be done.
        expected: [groups] moments at which that was expected.
        work: [groups] GPU-seconds of each.
        free_from: [GPUs] moments from which one, two, … GPUs are free, not falling.
        gpus: most GPUs that work at a time.
        pace: decides; its seconds of work are those of all of these GPUs.
        update_seconds: of the optimizer's step and the publication of the weights, after the last group.
    """
    order = np.argsort(arrivals, kind="stable")
    arrived, foreseen, amounts = arrivals[order], expected[order], work[order]
    usable = free_from[:gpus]
    there, backlog = 0, 0.0
    let_go: list[tuple[float, float]] = []
    asked: Floats | None = None
    now, last = 0.0, float(arrived[-1])
    while now < last or asked is None:
        came = int(np.searchsorted(arrived, now, side="right"))
        backlog += float(amounts[there:came].sum())
        there = came
        if asked is None and pace.begins(now, backlog / gpus, foreseen[there:], amounts[there:] / gpus) <= now:
            asked = np.maximum(usable, now)
        elif asked is not None and backlog <= 0 and pace.lets_go(now, foreseen[there:]):
            let_go += [(float(since), now) for since in asked if since < now]
            asked = None
        if now >= last and asked is not None:
            break
        after = min(now + LOOK_SECONDS, last) if now < last else now + LOOK_SECONDS
        if asked is not None:
            joined = asked + pace.start_seconds
            backlog = max(0.0, backlog - float(np.clip(after - np.maximum(joined, now), 0.0, None).sum()))
        now = after
    assert asked is not None
    backlog += float(amounts[there:].sum())
    joined = np.sort(np.maximum(asked + pace.start_seconds, now))
    reached = np.arange(1, len(joined) + 1) * joined - np.cumsum(joined)
    number = max(1, int(np.searchsorted(reached, backlog)))
    end = float((backlog + joined[:number].sum()) / number) + update_seconds
    held = float(np.maximum(end - asked, 0.0).sum()) + sum(until - since for since, until in let_go)
    working = int((joined < end - update_seconds).sum())
    return TrainerRun(end, working, held, tuple(asked[asked < end].tolist()), tuple(let_go))
