"""Plans of simulated asynchronous steps: every response once, within the split, and better with what was learnt."""

import itertools

from rlhfless_operator.planner.history import History
from rlhfless_operator.simulator.asynchronous.live_plans import LivePlans
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import draw_steps
from rlhfless_operator.simulator.instance import Instance, Response
from tests.simulator.small_scenario import SMALL

SYSTEM = Rollouts("any", "any", max_staleness=1)


def seconds(share: list[Response]) -> float:
    instance = Instance("a", SMALL.profile().latency, 0.0, max_batch=256, kv_tokens=10**9)
    instance.add(share)
    return instance.advance(1e9)[-1][0]


def test_shares_are_all_responses_on_no_more_actors_than_there_are_instances() -> None:
    groups = next(draw_steps(SMALL, SMALL.draw_trace(0), 0))
    shares = LivePlans(SMALL, SYSTEM, Split(3, 1, 256, preparers=1), History()).plan(groups).shares
    assert 1 <= len(shares) <= 3
    assert sorted(each.key for share in shares for each in share) == sorted(
        each.key for group in groups for each in group.responses()
    )


def test_plans_learn_lengths_from_steps_that_are_complete() -> None:
    steps = draw_steps(SMALL, SMALL.draw_trace(0), 0)
    plans = LivePlans(SMALL, SYSTEM, Split(3, 1, 256, preparers=1), History())
    first, second = itertools.islice(steps, 2)
    unknown = [seconds(share) for share in plans.plan(first).shares]
    plans.observe(first)
    known = [seconds(share) for share in plans.plan(second).shares]
    assert sum(known) < sum(unknown), "no default of half the longest response any more"
