"""Splits of simulated asynchronous steps: within the room that there is, and better with what was learnt."""

import itertools
from dataclasses import replace

from rlhfless_operator.planner.history import History
from rlhfless_operator.simulator.asynchronous.live_plans import LivePlans
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import draw_steps
from tests.simulator.small_scenario import SMALL

SYSTEM = Rollouts("any", "any", max_staleness=1)


def test_a_plan_has_all_groups_on_no_more_actors_than_there_are_instances() -> None:
    groups = next(draw_steps(SMALL, SMALL.draw_trace(0), 0))
    plan = LivePlans(SMALL, SYSTEM, Split(3, 1, 256, preparers=1), History()).plan(groups)
    assert 1 <= plan.actors <= 3
    assert plan.places >= plan.samples >= 1
    assert sorted(group.number for group in plan.order) == [group.number for group in groups]


def test_groups_that_were_long_before_begin_first() -> None:
    steps = draw_steps(SMALL, SMALL.draw_trace(0), 0)
    plans = LivePlans(SMALL, SYSTEM, Split(3, 1, 256, preparers=1), History())
    first = list(itertools.islice(steps, SMALL.steps_per_epoch))
    for groups in first:
        plans.observe(groups)
    order = plans.plan(first[0]).order
    means = [sum(group.lengths) / len(group.lengths) for group in order]
    assert sum(means[: len(means) // 2]) > sum(means[len(means) // 2 :])


def test_a_slower_learner_gets_no_more_actors_beside_it() -> None:
    fast = replace(SMALL, cost_weight=0.0)
    groups = next(draw_steps(fast, fast.draw_trace(0), 0))
    counts = []
    for learning in (0.01, 1000.0):
        history = History()
        history.add("learning", learning)
        counts.append(LivePlans(fast, SYSTEM, Split(6, 1, 256, preparers=1), history).plan(groups).actors)
    assert counts[0] > counts[1] == 1
