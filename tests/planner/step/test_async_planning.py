"""Plans of asynchronous steps: on the actors and preparers of the split by rates."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.step.async_planning import Asynchrony, split_step
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits
from rlhfless_operator.planner.step.preparers import matching_preparers
from rlhfless_operator.planner.step.rates import RateSplit
from rlhfless_operator.planner.step.whole_step import plan_step

PROFILE = InstanceProfile(LinearLatency(0.02, 0.0002, 1e-8, 1e-5), 1, 2**53, 3.0, 1.0)
LOADS = [SampleLoad(prompt, index, 100, 50.0 + 20 * prompt) for prompt in range(24) for index in range(4)]
TOKENS = sum(each.prompt_tokens + each.expected_tokens for each in LOADS)


def split_of(training: Training, learning: float, cost_weight: float = 0.5) -> RateSplit:
    limits, asynchrony = Limits(1, 6, None, 64), Asynchrony(1)
    return split_step(LOADS, PROFILE, limits, training, asynchrony, learning_seconds=learning, cost_weight=cost_weight)


@given(st.floats(1e-5, 0.05), st.floats(1.0, 60.0), st.integers(1, 3), st.integers(0, 6))
@settings(max_examples=25, deadline=None)
def test_preparers_match_the_pace_of_the_other_stages(
    token_seconds: float, learning: float, least: int, more: int
) -> None:
    preparers = tuple(dict.fromkeys((least, least + more)))
    found = split_of(Training(1, token_seconds, 0.0, 0.0, preparers=preparers, afterwards_seconds=learning), learning)
    expected = matching_preparers(
        token_seconds * TOKENS, generation=found.generation, learning=learning, least=least, most=least + more
    )
    assert found.preparers == expected


def test_all_preparers_begin_where_nothing_is_known_of_preparation() -> None:
    training = Training(1, 0.0, 0.0, 0.0, preparers=(1, 4), afterwards_seconds=5.0)
    assert split_of(training, 5.0).preparers.instances == 4


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
