"""When a learner that takes groups as they come begins, and when it lets its GPUs go while it waits for more.

It begins on the backlog that is there, and a forecast alone never keeps it: what is late is expected to take as long
again as it is late, or to the end of the step's longest response, as one that does not end by itself does. A pure
function of what is there and what is expected.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.step.overlap import TrainerRun

Floats = NDArray[np.float64]

LOOK_SECONDS = 0.25
"""Between two looks at what has come."""
_WORTH = 3.0
"""A backlog that takes this many times as long as a start is begun on at once, even if more is expected."""


@dataclass(frozen=True)
class LearnerPace:
    """Decides for one learner. All times are seconds into the step."""

    start_seconds: float
    """From asking for it to its working."""
    switch_seconds: float
    """How long a wait has to be for letting go to be worth it: an end and a start, the steps that are taken again,
    and what it is worth that the step may end later by a start."""
    last_seconds: float = math.inf
    """When the last group of all was expected; infinity where nothing is known of that."""

    def begins(self, now: float, backlog: float, expected: Floats, work: Floats) -> float:
        """When to ask for the learner, as things are now; `now` if at once.

        A learner that is asked at E − start − Σ work ends at E, the earliest end that there is, and of those that do so
        it holds its GPU for the shortest time (docs/research/planner.md, "The whole step"). One with a backlog of
        several starts has enough to do to let go afterwards.

        Args:
            now: seconds into the step.
            backlog: seconds of work that is there.
            expected: [groups] when those that are to come were expected.
            work: [groups] seconds of each.
        """
        if not expected.size or backlog >= _WORTH * self.start_seconds > 0:
            return now
        moments = still_expected(now, expected, self.last_seconds)
        order = np.argsort(moments, kind="stable")
        left = np.cumsum(work[order][::-1])[::-1]
        total = backlog + float(left[0])
        end = max(now + self.start_seconds + total, float((moments[order] + left).max()))
        return max(now, end - self.start_seconds - total)

    def lets_go(self, now: float, expected: Floats, again: float = 0.0) -> bool:
        """Whether a learner with nothing to do is better let go than kept waiting.

        Args:
            now: seconds into the step.
            expected: [groups] when those that are to come were expected.
            again: seconds of work that is lost with it; none where its gradients stay in the host's memory.
        """
        if not expected.size:
            return False
        soonest = float(still_expected(now, expected, self.last_seconds).min())
        return soonest - now > self.switch_seconds + again


def still_expected(now: float, expected: Floats, last: float = math.inf) -> Floats:
    """[groups] When to expect what has not come by now.

    What is late is expected after as long again as it is late, but not after the last of all: most likely it has a
    response that does not end by itself, and the forecast of the last of all rests on those.

    Args:
        last: when the last group of all was expected.
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
    look_seconds: float = LOOK_SECONDS,
) -> TrainerRun:
    """Work off groups in the order of their arrival, with a learner that begins and lets go as its pace says.

    Args:
        arrivals: [groups] when each group's work can be done.
        expected: [groups] when that was expected.
        work: [groups] GPU-seconds of each.
        free_from: [GPUs] when one, two, … GPUs are free, not falling.
        gpus: most GPUs that work at a time.
        pace: decides; its seconds of work are those of all of these GPUs.
        update_seconds: of the optimizer's step and the publication of the weights, after the last group.
        look_seconds: between two decisions.
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
        after = min(now + look_seconds, last) if now < last else now + look_seconds
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
