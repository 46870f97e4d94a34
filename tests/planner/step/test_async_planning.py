"""Plans of asynchronous steps: the number of preparation instances matches the plan's own pace."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.step.async_planning import AsynchronousPlan, plan_asynchronous_step
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.least_period import least_period
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits
from rlhfless_operator.planner.step.preparers import matching_preparers
from rlhfless_operator.planner.step.whole_step import StepPlan, plan_step

PROFILE = InstanceProfile(LinearLatency(0.02, 0.0002, 1e-8, 1e-5), 1, 2**53, 3.0, 1.0)
LOADS = [SampleLoad(prompt, index, 100, 50.0 + 20 * prompt) for prompt in range(24) for index in range(4)]
TOKENS = sum(each.prompt_tokens + each.expected_tokens for each in LOADS)


def made(token_seconds: float, learning: float, preparers: tuple[int, ...]) -> tuple[AsynchronousPlan, list[Training]]:
    asked: list[Training] = []

    def plan_with(training: Training) -> StepPlan:
        asked.append(training)
        return plan_step(LOADS, PROFILE, Limits(1, 6, None, 64), training, cost_weight=0.5, ready_seconds=1.0)

    training = Training(1, token_seconds, 0.0, 0.0, preparers=preparers, afterwards_seconds=learning)
    found = plan_asynchronous_step(
        plan_with, training, tokens=TOKENS, startup_seconds=3.0, learning_seconds=learning, max_staleness=1
    )
    return found, asked


@given(st.floats(1e-5, 0.05), st.floats(1.0, 60.0), st.integers(1, 3), st.integers(0, 6))
@settings(max_examples=25, deadline=None)
def test_preparers_match_the_pace_of_the_other_stages(
    token_seconds: float, learning: float, least: int, more: int
) -> None:
    most = least + more
    found, asked = made(token_seconds, learning, tuple(dict.fromkeys((least, most))))
    assert asked[0].preparers == (most,)
    first = plan_step(LOADS, PROFILE, Limits(1, 6, None, 64), asked[0], cost_weight=0.5, ready_seconds=1.0)
    pace = least_period([share.expected_seconds - 3.0 for share in first.generation.shares], learning, 1)
    expected = matching_preparers(token_seconds * TOKENS, generation=pace, learning=learning, least=least, most=most)
    assert found.preparers == expected
    assert found.step.preparers == expected.instances
    assert len(asked) == (1 if expected.instances == most else 2)


def test_a_single_preparer_needs_one_plan_and_has_that_of_a_synchronous_step() -> None:
    found, asked = made(1e-3, 10.0, (1,))
    assert len(asked) == 1
    alone = plan_step(LOADS, PROFILE, Limits(1, 6, None, 64), asked[0], cost_weight=0.5, ready_seconds=1.0)
    assert found.step == alone


@pytest.mark.parametrize(("cost_weight", "fewer"), [(0.0, False), (1.0, True)])
def test_a_synchronous_step_weighs_preparers_by_time_and_price(cost_weight: float, fewer: bool) -> None:
    training = Training(1, 5e-3, 0.0, 0.0, preparers=(1, 2, 4), afterwards_seconds=5.0)
    step = plan_step(LOADS, PROFILE, Limits(1, 6, None, 64), training, cost_weight=cost_weight, ready_seconds=1.0)
    assert step.preparers == (1 if fewer else 4)
    # Nothing to prepare: more would bring nothing.
    idle = replace(training, token_gpu_seconds=0.0)
    step = plan_step(LOADS, PROFILE, Limits(1, 6, None, 64), idle, cost_weight=cost_weight, ready_seconds=1.0)
    assert step.preparers == 1


def test_starts_of_preparers_are_paid_for() -> None:
    training = Training(1, 2e-3, 0.0, 0.0, preparers=(1, 2), afterwards_seconds=5.0)
    limits = Limits(1, 6, None, 64)
    found = [
        plan_step(
            LOADS, PROFILE, limits, replace(training, preparer_idle_seconds=idle), cost_weight=0.5, ready_seconds=1.0
        ).preparers
        for idle in (0.0, 1e4)
    ]
    assert found == [2, 1]
