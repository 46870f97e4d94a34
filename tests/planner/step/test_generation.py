"""The plan of a step's generation: every sample once, within the limits, with what the other stages make of it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.lengths import LengthEstimate
from rlhfless_operator.planner.pools.contention import Contention
from rlhfless_operator.planner.step.async_planning import Asynchrony
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.generation import ExpectedGroup, ExpectedSamples, StepSetting, plan_generation
from rlhfless_operator.planner.step.learner_scaling import LearnerOption
from rlhfless_operator.planner.step.planning import Limits, PolicyName

INSTANCE = InstanceProfile(
    LinearLatency(0.01, 4e-5, 5e-8, 2e-5), 1, 2**53, startup_seconds=2.0, weight_load_seconds=1.0
)
TRAINING = Training(1, 1e-3, 0.0, 0.0, preparers=(1, 2), afterwards_seconds=2.0)
SETTING = StepSetting(INSTANCE, Limits(1, 6), TRAINING, learning_seconds=2.0)


def expected(means: list[float], samples: int = 4, longest: int = 512, runaways: float = 0.0) -> ExpectedSamples:
    return ExpectedSamples.of(
        [
            ExpectedGroup(prompt, 10 + prompt, samples, LengthEstimate(mean, mean / 3, 2, runaways))
            for prompt, mean in enumerate(means)
        ],
        longest,
    )


SAMPLES = expected([20.0, 60.0, 100.0, 30.0, 200.0])


@given(
    means=st.lists(st.floats(1, 500), min_size=1, max_size=6),
    policy=st.sampled_from(["even", "cost"]),
    most=st.integers(1, 5),
    actors=st.none() | st.integers(1, 5),
    max_staleness=st.none() | st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_every_sample_is_in_one_share_and_other_jobs_keep_their_gpus(
    means: list[float], policy: PolicyName, most: int, actors: int | None, max_staleness: int | None
) -> None:
    samples = expected(means, runaways=0.3)
    asynchrony = None if max_staleness is None else Asynchrony(max_staleness)
    setting = replace(SETTING, limits=Limits(1, most), contention=Contention(0.3, actors), asynchrony=asynchrony)
    made = plan_generation(policy, samples, setting)
    planned = [sample for share in made.generation.shares for sample in share.samples]
    assert sorted((each.prompt, each.index) for each in planned) == [
        (p, i) for p in range(len(means)) for i in range(4)
    ]
    assert len(made.generation.shares) <= (min(most, actors or most) if policy == "cost" else most)
    assert made.preparers in (1, 2)


def test_a_runaway_is_foreseen_only_where_there_may_be_one() -> None:
    assert SAMPLES.tail_tokens == 0.0
    assert expected([20.0], runaways=0.1).tail_tokens == 512.0
    assert SAMPLES.tokens == pytest.approx(sum(each.prompt_tokens + each.expected_tokens for each in SAMPLES.loads))


def test_policies_without_a_cost_plan_generation_alone() -> None:
    made = plan_generation("even", SAMPLES, SETTING)
    assert made.whole is None and made.groups is None and made.learners is None
    assert made.expected_seconds == made.generation.expected_seconds + 2.0
    assert made.expected_generation_seconds == made.generation.expected_seconds - 2.0
    assert (made.preparers, made.preparers_reason) == (2, "")


def test_a_number_of_preparers_has_a_reason_where_there_is_a_choice() -> None:
    assert "instance-seconds a step" in plan_generation("cost", SAMPLES, SETTING).preparers_reason
    alone = replace(SETTING, training=replace(TRAINING, preparers=(1,)))
    assert plan_generation("cost", SAMPLES, alone).preparers_reason == ""


def test_a_learner_that_follows_is_told_what_each_group_takes_on_the_instances_that_were_chosen() -> None:
    assert plan_generation("cost", SAMPLES, SETTING).groups is None, "it waits for the whole batch"
    following = replace(TRAINING, accumulation_token_seconds=0.01, follows=True, learning_price=2.0)
    one = plan_generation("cost", SAMPLES, replace(SETTING, training=following))
    assert one.groups is not None and one.learners is None
    assert sum(one.groups.learning.values()) == pytest.approx(0.01 * SAMPLES.tokens)
    assert one.groups.time_price == pytest.approx(one.time_price / 2.0)
    options = (LearnerOption(3, 0.002, 1.0, 0.0),)
    three = plan_generation("cost", SAMPLES, replace(SETTING, training=replace(following, learners=options)))
    assert three.groups is not None and three.learners == 3
    assert sum(three.groups.learning.values()) == pytest.approx(0.002 * SAMPLES.tokens)
    assert three.groups.time_price == pytest.approx(three.time_price / 6.0)
