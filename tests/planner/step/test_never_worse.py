"""Where GPUs can be held, a plan is no worse than static actors: not dearer by 2 %, and not slower at equal cost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.step.forecast import Holding, StepForecast, Tail, Training
from rlhfless_operator.planner.step.loads import Loads, SampleLoad
from rlhfless_operator.planner.step.planning import Limits, Planner
from rlhfless_operator.planner.step.whole_step import StepPlan, plan_step
from tests.simulator.small_scenario import PROFILE

LENGTHS = st.lists(st.integers(5, 900), min_size=4, max_size=24)


def planned(
    lengths: list[int], gpus: int, start: float, weight: float, *, known: bool
) -> tuple[StepPlan, float, float]:
    """Return the plan, and the seconds and GPU-seconds of static actors."""
    samples = [SampleLoad(prompt, 0, 100, float(length)) for prompt, length in enumerate(lengths)]
    profile = dataclasses.replace(PROFILE, startup_seconds=start)
    training = Training(gpus, 2e-3, start, 0.5)
    limits, holding = Limits(1, gpus), Holding(gpus, start, 2 * start)
    plan = plan_step(
        samples,
        profile,
        limits,
        training,
        cost_weight=weight,
        ready_seconds=profile.weight_load_seconds,
        holding=holding,
        known=known,
    )
    loads = Loads(samples, profile.latency, kv_tokens=None, max_batch=None)
    charged = profile.startup_seconds + profile.weight_load_seconds
    even = Planner(samples, profile.latency, limits, charged, loads=loads).dealt(gpus)
    tail = Tail.of(loads, 0.0, {})
    tokens = np.bincount(loads.group, loads.context + loads.length, loads.groups)
    forecast = StepForecast(even, loads, profile, profile.weight_load_seconds, tail)
    return plan, *forecast.held(training.token_gpu_seconds * tokens, training, holding)


@given(LENGTHS, st.integers(2, 8), st.sampled_from((0.5, 6.0, 30.0)), st.sampled_from((0.05, 0.5, 0.95)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_plan_is_never_worse_than_static_actors_by_its_forecast(
    lengths: list[int], gpus: int, start: float, weight: float, known: bool
) -> None:
    gpus = min(gpus, len(lengths))
    plan, seconds, gpu_seconds = planned(lengths, gpus, start, weight, known=known)
    assert plan.expected_gpu_seconds <= 1.02 * gpu_seconds * (1 + 1e-9)
    if plan.expected_gpu_seconds * 1.02 >= gpu_seconds:
        assert plan.expected_seconds <= seconds * (1 + 1e-9)


def test_where_nothing_can_be_saved_everything_is_held() -> None:
    plan, seconds, _ = planned([400] * 8, 4, 60.0, 0.05, known=True)
    assert plan.holds
    assert len(plan.generation.shares) == 4
    assert plan.expected_seconds == pytest.approx(seconds)


def test_without_a_history_held_gpus_have_equal_shares() -> None:
    """Lengths without a history may be those of other samples: shares by length ended twice as late as equal ones."""
    lengths = [40, 60, 80, 100, 300, 500, 700, 900]
    plan, *_ = planned(lengths, 4, 60.0, 0.05, known=False)
    assert plan.holds
    assert [len(share.samples) for share in plan.generation.shares] == [2, 2, 2, 2]
    informed, *_ = planned(lengths, 4, 60.0, 0.05, known=True)
    assert [len(share.samples) for share in informed.generation.shares] != [2, 2, 2, 2]
