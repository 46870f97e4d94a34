"""Steps whose instances stay: what they are charged, and where the plan of a step chooses them."""

from dataclasses import replace

import pytest

from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.lengths import LengthEstimate
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.generation import (
    ExpectedGroup,
    ExpectedSamples,
    PlannedStep,
    StepSetting,
    plan_generation,
)
from rlhfless_operator.planner.step.holding import STEPS_OF_A_START, StagesHolding, Staying
from rlhfless_operator.planner.step.planning import Limits

LATENCY = LinearLatency(step_seconds=0.02, sequence_seconds=1e-4, context_seconds=1e-8, prefill_token_seconds=1e-5)
SAMPLES = ExpectedSamples.of(
    (ExpectedGroup(prompt, 100, 8, LengthEstimate(400.0 + 20 * prompt, 100.0, 2)) for prompt in range(16)),
    longest=1024,
)


def planned(
    switch_seconds: float, there: int, *, learning_seconds: float = 8.0, late: float = 0.0, learners: int = 1
) -> PlannedStep:
    """A step of about 10 s of generation and 8 s of learning, of instances of which so many are there."""
    one, gang = min(1, there), min(learners, there)
    staying = [Staying(there, switch_seconds), Staying(one, switch_seconds), Staying(gang, 10.0)]
    training = Training(
        gpus=1, token_gpu_seconds=1e-5, start_seconds=0.0, update_seconds=0.0, preparers=(1,),
        afterwards_seconds=learning_seconds, learning_instances=learners, learner_idle_seconds=10.0,
        holding=StagesHolding(*staying, late_seconds=late),
    )  # fmt: skip
    profile = InstanceProfile(LATENCY, gpus=1, kv_tokens=2**53, startup_seconds=switch_seconds, weight_load_seconds=0.0)
    return plan_generation("cost", SAMPLES, StepSetting(profile, Limits(1, 8), training))


def test_all_instances_stay_where_a_start_takes_longer_than_they_would_idle() -> None:
    made = planned(switch_seconds=30.0, there=8)
    assert made.holds
    assert made.holds_reason.startswith("to keep all of them takes ")
    assert " GPU-seconds of generation, to let them go" in made.holds_reason
    assert not planned(switch_seconds=1.0, there=8).holds


def test_nothing_stays_where_a_start_costs_nothing_or_learning_takes_long() -> None:
    assert not planned(switch_seconds=0.0, there=0).holds
    assert not planned(switch_seconds=5.0, there=8, learning_seconds=500.0).holds


def test_the_plan_that_is_taken_is_the_better_of_both() -> None:
    for switch in (0.0, 3.0, 10.0, 30.0, 100.0):
        made = planned(switch, there=4)
        assert made.whole is not None and made.whole.otherwise is not None
        seconds, gpu_seconds = made.whole.otherwise
        mine = made.whole
        assert mine.expected_seconds <= seconds or mine.expected_gpu_seconds <= gpu_seconds


def test_instances_that_are_not_there_yet_are_charged_a_part_of_their_start() -> None:
    stays = StagesHolding(Staying(3, 16.0), Staying(0, 8.0, price=0.5), Staying(1, 80.0, price=4.0), late_seconds=4.0)
    seconds, paid = stays.stay(10.0, 5, 1, 1)
    assert seconds == 10.0 + 4.0 / STEPS_OF_A_START
    assert paid == pytest.approx(seconds * (5 + 0.5 + 4.0) + (2 * 16.0 + 0.5 * 8.0) / STEPS_OF_A_START)
    everything = replace(stays, generation=Staying(5, 16.0), preparation=Staying(1, 8.0, price=0.5))
    assert everything.stay(10.0, 5, 1, 1) == (10.0, pytest.approx(95.0))


def test_a_start_that_learning_does_not_hide_speaks_for_staying() -> None:
    assert not planned(4.0, there=8).holds
    assert planned(4.0, there=8, late=100.0).holds


def test_only_a_start_of_generation_makes_a_step_late() -> None:
    there = StagesHolding(Staying(5, 16.0), Staying(0, 8.0), Staying(0, 80.0), late_seconds=4.0)
    assert there.stay(10.0, 5, 1, 1)[0] == 10.0
    assert there.stay(10.0, 6, 1, 1)[0] == 10.0 + 4.0 / STEPS_OF_A_START


def test_a_gang_that_would_idle_for_longer_than_a_switch_takes_is_not_held() -> None:
    """While generation takes 19 s, each of its learners would idle. To let one go and start it again takes 10 s."""
    alone, gang = planned(30.0, there=8), planned(30.0, there=8, learners=4)
    assert alone.holds
    assert not gang.holds
    assert gang.whole is not None and gang.whole.otherwise is not None
    assert gang.whole.expected_gpu_seconds >= 4 * (8.0 + 10.0), "each of them is charged where they come and go"
    seconds, gpu_seconds = gang.whole.otherwise
    assert gpu_seconds >= 4 * seconds, "and where they stay"
