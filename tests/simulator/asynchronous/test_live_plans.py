"""Plans of simulated asynchronous steps: every response once, within the split, and better with what was learnt."""

import itertools
from collections import Counter

from rlhfless_operator.planner.history import History
from rlhfless_operator.simulator.asynchronous.live_plans import LivePlans
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import draw_steps
from tests.simulator.small_scenario import SMALL

SYSTEM = Rollouts("any", "any", max_staleness=1)


def test_shares_are_all_responses_on_no_more_actors_than_there_are_instances() -> None:
    groups = next(draw_steps(SMALL, SMALL.draw_trace(0), 0))
    shares = LivePlans(SMALL, SYSTEM, Split(3, 1, 256, preparers=1), History()).plan(groups).shares
    assert 1 <= len(shares) <= 3
    ended = Counter(number for share in shares for _, number in share)
    assert ended == {group.number: len(group.lengths) for group in groups}


def test_plans_learn_lengths_from_steps_that_are_complete() -> None:
    steps = draw_steps(SMALL, SMALL.draw_trace(0), 0)
    plans = LivePlans(SMALL, SYSTEM, Split(3, 1, 256, preparers=1), History())
    first, second = itertools.islice(steps, 2)
    unknown = [share[-1][0] for share in plans.plan(first).shares]
    plans.observe(first)
    known = [share[-1][0] for share in plans.plan(second).shares]
    assert sum(known) < sum(unknown), "no default of half the longest response any more"
