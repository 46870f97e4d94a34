"""A step as a whole: generation and training planned together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.holding import Holding
from rlhfless_operator.planner.step.learner_scaling import LearnerOption
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits
from rlhfless_operator.planner.step.whole_step import StepPlan, plan_step

PROFILE = InstanceProfile(LinearLatency(0.010, 2e-5, 5e-8, 3e-5), 1, 10**6, 1.0, 2.0)
SAMPLES = [SampleLoad(prompt, index, 100, 100 + 15 * prompt) for prompt in range(40) for index in range(4)]
CLUSTER = 8


def plan(weight, *, samples=SAMPLES, token_gpu_seconds=4e-4, **options):
    return plan_step(
        samples,
        PROFILE,
        Limits(1, CLUSTER, PROFILE.kv_tokens, 256),
        Training(CLUSTER, token_gpu_seconds, 2.0, 0.5),
        cost_weight=weight,
        ready_seconds=2.0,
        **options,
    )


def test_a_dearer_second_buys_a_shorter_step():
    fast, even, cheap = (plan(weight) for weight in (0.0, 0.5, 1.0))
    assert fast.expected_seconds <= even.expected_seconds <= cheap.expected_seconds
    assert fast.expected_gpu_seconds >= even.expected_gpu_seconds >= cheap.expected_gpu_seconds
    assert fast.time_price > even.time_price > cheap.time_price


def test_every_sample_is_in_the_plan_once():
    dealt = [(each.prompt, each.index) for share in plan(0.3).generation.shares for each in share.samples]
    assert sorted(dealt) == sorted((each.prompt, each.index) for each in SAMPLES)


def test_the_trainer_works_under_the_tail():
    step = plan(0.3)
    work = 4e-4 * sum(each.prompt_tokens + each.expected_tokens for each in SAMPLES)
    afterwards = step.generation.expected_seconds - 1.0 + work / CLUSTER + 0.5
    assert step.expected_seconds < afterwards


def plan_apart(weight=0.3, **training):
    """A plan where preparation and learning have GPUs of their own."""
    return plan_step(
        SAMPLES,
        PROFILE,
        Limits(1, CLUSTER, PROFILE.kv_tokens, 256),
        Training(1, 1e-5, 0.0, 0.0, preparers=(1,), **training),
        cost_weight=weight,
        ready_seconds=2.0,
    )


def test_a_learner_that_follows_preparation_shortens_the_step_and_waits_for_nothing():
    tokens = sum(each.prompt_tokens + each.expected_tokens for each in SAMPLES)
    work = 2e-4 * tokens
    afterwards = plan_apart(afterwards_seconds=work + 1.0)
    followed = plan_apart(afterwards_seconds=1.0, accumulation_token_seconds=2e-4)
    assert afterwards.trainer.begin == pytest.approx(afterwards.expected_seconds - work - 1.0)
    assert followed.expected_seconds < afterwards.expected_seconds
    # It works from when it begins to the end without a break.
    assert followed.trainer.begin == pytest.approx(followed.expected_seconds - work - 1.0)


def test_a_learner_with_more_to_do_than_generation_begins_with_the_first_groups():
    assert plan_apart(afterwards_seconds=1.0, accumulation_token_seconds=1.0).trainer.begin > 0
    assert plan_apart(afterwards_seconds=1.0, accumulation_token_seconds=1.0).trainer.begin < 5


def test_a_dearer_learner_is_waited_for_less_than_a_dearer_generation():
    cheap, even, dear = (
        plan_apart(afterwards_seconds=5.0, preparation_price=price, learning_price=price) for price in (0.01, 1, 100)
    )
    assert cheap.expected_seconds >= even.expected_seconds >= dear.expected_seconds
    assert cheap.expected_seconds > dear.expected_seconds
    assert cheap.generation.expected_instance_seconds < dear.generation.expected_instance_seconds
    assert even == plan_apart(afterwards_seconds=5.0), "as if there were no prices"


def test_little_training_leaves_the_cheapest_generation():
    step = plan(1.0, token_gpu_seconds=1e-9)
    assert len(step.generation.shares) == 1


def test_possible_runaways_are_foreseen_in_the_time():
    calm = plan(0.0)
    wary = plan(0.0, tail_tokens=2000.0, runaways=dict.fromkeys(range(40), 0.02))
    assert calm.expected_seconds < 0.010 * 2000 < wary.expected_seconds


HELD = Holding(CLUSTER, 0.0, 0.0)


def test_gpus_are_held_where_starts_cost_more() -> None:
    """With starts that take longer than the work, nothing is let go; with free ones, everything is."""
    dear = InstanceProfile(PROFILE.latency, 1, 10**6, 30.0, 2.0)
    free = InstanceProfile(PROFILE.latency, 1, 10**6, 0.0, 0.0)

    def step(profile, start, holding=HELD):
        training = Training(CLUSTER, 4e-4, start, 0.5)
        limits = Limits(1, CLUSTER, PROFILE.kv_tokens, 256)
        ready = profile.weight_load_seconds
        return plan_step(
            SAMPLES, profile, limits, training, cost_weight=0.5, ready_seconds=ready, holding=holding
        )  # fmt: skip

    held = step(dear, 30.0)
    assert held.holds
    assert held.expected_gpu_seconds == pytest.approx(len(held.generation.shares) * held.expected_seconds)
    assert not step(free, 0.0).holds
    assert not step(dear, 30.0, None).holds


def test_a_step_is_charged_its_part_of_starting_gpus_that_are_to_be_held() -> None:
    """So the plan does not change between holding and letting go for next to nothing."""
    profile = InstanceProfile(PROFILE.latency, 1, 10**6, 30.0, 2.0)
    training = Training(CLUSTER, 4e-4, 30.0, 0.5)

    def step(held: int, start: float) -> StepPlan:
        return plan_step(
            SAMPLES, profile, Limits(1, CLUSTER, PROFILE.kv_tokens, 256), training, cost_weight=0.5,
            ready_seconds=2.0, holding=Holding(held, start / 2, start),
        )  # fmt: skip

    before, fresh = step(CLUSTER, 60.0), step(0, 60.0)
    gpus = len(before.generation.shares)
    assert before.holds and before.expected_gpu_seconds == pytest.approx(gpus * before.expected_seconds)
    assert fresh.expected_seconds + fresh.expected_gpu_seconds > before.expected_seconds + before.expected_gpu_seconds
    assert not step(0, 1e6).holds


def test_a_weight_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"cost_weight is -1: .* nearest is 0"):
        plan(-1)


def learners(scaling, **seconds):
    """Numbers of learning instances whose times are those of one, divided by `scaling`."""
    return tuple(LearnerOption(count, 2e-3 / speed, **seconds) for count, speed in scaling.items())


NOTHING_BESIDES = {"rest_seconds": 0.0, "idle_seconds": 0.0}


@pytest.mark.parametrize("follows", [False, True])
def test_learners_are_more_where_time_counts_and_fewer_where_cost_does(follows):
    choice = learners({1: 1, 2: 1.9, 4: 3.0}, **NOTHING_BESIDES)
    counts = [plan_apart(weight, learners=choice, follows=follows).trainer.gpus for weight in (0.0, 0.5, 1.0)]
    assert counts[0] == 4
    assert counts == sorted(counts, reverse=True)
    assert counts[2] == 1


def test_learners_that_scale_linearly_are_as_many_as_there_may_be():
    assert plan_apart(learners=learners({1: 1, 2: 2, 4: 4}, **NOTHING_BESIDES)).trainer.gpus == 4


def test_learners_that_do_not_scale_are_one():
    assert plan_apart(learners=learners({1: 1, 2: 1, 4: 1}, **NOTHING_BESIDES)).trainer.gpus == 1


def test_each_learner_is_charged_for_what_it_is_held_without_work():
    counts = [
        plan_apart(0.6, learners=learners({1: 1, 2: 2, 4: 4}, rest_seconds=0.0, idle_seconds=idle)).trainer.gpus
        for idle in (0.0, 1000.0)
    ]
    assert counts[0] == 4
    assert counts[1] < 4


@given(st.lists(st.floats(0.5, 8), min_size=1, max_size=5), st.floats(0, 1), st.booleans())
@settings(max_examples=15, deadline=None)
def test_no_number_of_learners_is_better_in_both_time_and_cost(speeds, weight, follows):
    choice = learners(dict(enumerate(speeds, start=1)), rest_seconds=0.1, idle_seconds=1.0)
    chosen = plan_apart(learners=choice, follows=follows, weight=weight)
    for each in choice:
        other = plan_apart(learners=(each,), follows=follows, weight=weight)
        assert (
            other.expected_seconds >= chosen.expected_seconds * 0.98
            or other.expected_gpu_seconds >= chosen.expected_gpu_seconds * 0.98
        )
