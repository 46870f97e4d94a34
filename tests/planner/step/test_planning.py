"""Plans: what each policy does, that the best one is the best, and what bad demands are told."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.step.loads import Loads, SampleLoad
from rlhfless_operator.planner.step.planning import InfeasibleError, Limits, Planner, plan

LATENCY = LinearLatency(step_seconds=0.010, sequence_seconds=0.0002, context_seconds=2e-7, prefill_token_seconds=0.0001)


def group(prompt, *lengths, tokens=100):
    return [SampleLoad(prompt, index, tokens, length) for index, length in enumerate(lengths)]


def keys(share):
    return {(sample.prompt, sample.index) for sample in share.samples}


def by_hand(samples, start):
    """Seconds of one instance, written out from the model's definition."""
    decode = sum(
        LATENCY.sequence_seconds * s.expected_tokens
        + LATENCY.context_seconds * (s.prompt_tokens * s.expected_tokens + s.expected_tokens**2 / 2)
        for s in samples
    )
    prompts = {s.prompt: s.prompt_tokens for s in samples}
    return (
        start
        + LATENCY.step_seconds * max(s.expected_tokens for s in samples)
        + decode
        + LATENCY.prefill_token_seconds * sum(prompts.values())
    )


def partitions(items):
    """All ways to divide a list into non-empty sets."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for k, part in enumerate(smaller):
            yield [*smaller[:k], [first, *part], *smaller[k + 1 :]]


groups_of_equals = st.lists(
    st.tuples(st.integers(1, 2000), st.integers(1, 3), st.integers(0, 500)), min_size=1, max_size=6
).map(
    lambda rows: [
        sample
        for prompt, (length, n, tokens) in enumerate(rows)
        for sample in group(prompt, *[length] * n, tokens=tokens)
    ]
)


def test_even_deals_prompts_in_the_order_given():
    samples = [sample for prompt in (5, 3, 9, 1, 7) for sample in group(prompt, 10, 10)]
    result = plan("even", samples, LATENCY, Limits(max_instances=2))
    assert [{sample.prompt for sample in share.samples} for share in result.shares] == [{5, 3, 9}, {1, 7}]


def test_even_has_no_instance_without_a_prompt():
    assert len(plan("even", group(0, 5, 5) + group(1, 5), LATENCY, Limits(max_instances=8)).shares) == 2


def test_like_lengths_go_together():
    samples = [sample for prompt, length in enumerate((100, 1000, 110, 900)) for sample in group(prompt, length)]
    result = plan("cost", samples, LATENCY, Limits(max_instances=2), cost_weight=0)
    assert [{sample.prompt for sample in share.samples} for share in result.shares] == [{1}, {0, 2, 3}]


@pytest.mark.parametrize("policy", ["even", "cost"])
@given(samples=groups_of_equals, most=st.integers(1, 4), weight=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_every_plan_gives_each_sample_to_one_actor_and_forecasts_its_time(policy, samples, most, weight):
    result = plan(policy, samples, LATENCY, Limits(max_instances=most), cost_weight=weight, startup_seconds=0.5)
    dealt = [(sample.prompt, sample.index) for share in result.shares for sample in share.samples]
    assert sorted(dealt) == sorted((sample.prompt, sample.index) for sample in samples)
    assert 1 <= len(result.shares) <= most
    for share in result.shares:
        assert share.expected_seconds == pytest.approx(by_hand(share.samples, 0.5))
    assert result.expected_seconds == max(share.expected_seconds for share in result.shares)
    assert result.expected_instance_seconds == pytest.approx(sum(share.expected_seconds for share in result.shares))
    assert result.lower_bound_instance_seconds <= result.expected_instance_seconds * (1 + 1e-9)


@given(lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=7), most=st.integers(1, 4), weight=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_the_cost_policy_finds_the_best_of_all_contiguous_partitions(lengths, most, weight):
    samples = [sample for prompt, length in enumerate(lengths) for sample in group(prompt, length)]
    ordered = sorted(samples, key=lambda sample: -sample.expected_tokens)
    times = []
    for cuts in range(min(most, len(samples))):
        for at in itertools.combinations(range(1, len(samples)), cuts):
            edges = [0, *at, len(samples)]
            times.append([by_hand(ordered[a:b], 0.3) for a, b in itertools.pairwise(edges)])
    fastest, cheapest = min(map(max, times)), min(map(sum, times))
    best = min((1 - weight) * max(each) / fastest + weight * sum(each) / cheapest for each in times)
    planner = Planner(samples, LATENCY, Limits(max_instances=most), 0.3, tolerance=0)
    result = planner.weighted(weight)
    found = (1 - weight) * result.expected_seconds / fastest + weight * result.expected_instance_seconds / cheapest
    assert found == pytest.approx(best, rel=1e-9)
    assert planner.least_seconds == pytest.approx(fastest)
    assert planner.least_instance_seconds == pytest.approx(cheapest)


@given(lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=6), ratio=st.floats(1, 3))
@settings(max_examples=40, deadline=None)
def test_no_partition_at_all_is_cheaper_than_ours_with_one_more_sample_of_time(lengths, ratio):
    """docs/research/planner.md, theorem 2: what contiguity can lose is one sample's work."""
    samples = [sample for prompt, length in enumerate(lengths) for sample in group(prompt, length)]
    planner = Planner(samples, LATENCY, Limits(max_instances=6), 0.3, tolerance=0)
    limit = planner.least_seconds * ratio
    others = [[by_hand(part, 0.3) for part in parts] for parts in partitions(samples)]
    rival = min(sum(times) for times in others if max(times) <= limit * (1 + 1e-9))
    heaviest = max(by_hand([sample], 0) - LATENCY.step_seconds * sample.expected_tokens for sample in samples)
    ours = planner.within_deadline(limit + heaviest + 1e-9)
    assert ours.expected_instance_seconds <= rival * (1 + 1e-9)


@given(samples=groups_of_equals, most=st.integers(1, 4), ratio=st.floats(1.0001, 4))
@settings(max_examples=40, deadline=None)
def test_a_deadline_is_kept(samples, most, ratio):
    planner = Planner(samples, LATENCY, Limits(max_instances=most), 0.3, tolerance=0)
    hurried = planner.within_deadline(planner.least_seconds * ratio)
    assert hurried.expected_seconds <= planner.least_seconds * ratio * (1 + 1e-9)


@given(samples=groups_of_equals)
@settings(max_examples=20, deadline=None)
def test_the_front_falls_in_cost_as_it_rises_in_time(samples):
    planner = Planner(samples, LATENCY, Limits(max_instances=4), 0.3)
    front = planner.front(8)
    assert front[0].expected_seconds == pytest.approx(planner.least_seconds, rel=1e-3)
    assert front[-1].expected_instance_seconds == pytest.approx(planner.least_instance_seconds, rel=1e-3)
    for faster, cheaper in itertools.pairwise(front):
        assert faster.expected_seconds < cheaper.expected_seconds
        assert faster.expected_instance_seconds > cheaper.expected_instance_seconds


def test_a_group_stays_whole_where_nothing_is_gained_by_dividing_it():
    samples = [sample for prompt in range(4) for sample in group(prompt, *[500] * 8)]
    result = plan("cost", samples, LATENCY, Limits(max_instances=2), cost_weight=0)
    assert [len({sample.prompt for sample in share.samples}) for share in result.shares] == [2, 2]


def test_a_group_is_divided_where_that_gains():
    samples = group(0, *[500] * 64) + group(1, *[500] * 4)
    result = plan("cost", samples, LATENCY, Limits(max_instances=2), cost_weight=0)
    assert abs(len(result.shares[0].samples) - len(result.shares[1].samples)) <= 2


def test_startup_makes_few_instances_better():
    samples = [sample for prompt in range(64) for sample in group(prompt, *[300] * 4)]
    few, many = (
        plan("cost", samples, LATENCY, Limits(max_instances=16), cost_weight=0.3, startup_seconds=seconds)
        for seconds in (60, 0)
    )
    assert len(few.shares) < len(many.shares)


def test_the_least_number_of_instances_is_kept():
    samples = [sample for prompt in range(8) for sample in group(prompt, 100)]
    result = plan("cost", samples, LATENCY, Limits(min_instances=3, max_instances=8), cost_weight=1)
    assert len(result.shares) == 3


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=30),
    batch=st.integers(1, 4),
    most=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_a_share_larger_than_a_batch_is_charged_for_its_waves(lengths, batch, most):
    samples = [sample for prompt, length in enumerate(lengths) for sample in group(prompt, length)]
    result = plan("cost", samples, LATENCY, Limits(max_instances=most, max_batch=batch), cost_weight=0.5)
    for share in result.shares:
        tokens = [sample.expected_tokens for sample in share.samples]
        assert share.expected_seconds >= LATENCY.step_seconds * max(max(tokens), sum(tokens) / batch) * (1 - 1e-9)
    assert result.lower_bound_instance_seconds <= result.expected_instance_seconds * (1 + 1e-9)


def test_the_kv_cache_bounds_how_much_runs_at_once():
    samples = [sample for prompt in range(10) for sample in group(prompt, 100)]
    roomy, tight = (plan("even", samples, LATENCY, Limits(kv_tokens=tokens)).expected_seconds for tokens in (2000, 400))
    assert tight - roomy == pytest.approx(LATENCY.step_seconds * (10 * 100 * 200 / 400 - 100))


away = st.lists(st.floats(0, 500), min_size=18, max_size=18)


def with_away(samples, seconds):
    return [replace(sample, away_seconds=each) for sample, each in zip(samples, seconds, strict=False)]


@given(samples=groups_of_equals, seconds=away, most=st.integers(1, 4), weight=st.floats(0, 1))
def test_a_sample_that_is_away_ends_later_by_as_much_and_its_actor_is_held(samples, seconds, most, weight):
    acting = with_away(samples, seconds)
    result = plan("cost", acting, LATENCY, Limits(max_instances=most), cost_weight=weight)
    assert sum(len(share.samples) for share in result.shares) == len(samples)
    for share in result.shares:
        here = Loads(share.samples, LATENCY, kv_tokens=None, max_batch=None)
        there = Loads(
            [replace(each, away_seconds=0.0) for each in share.samples], LATENCY, kv_tokens=None, max_batch=None
        )
        everything = np.arange(len(share.samples))
        ends = there.ends(everything, 0.0) + [each.away_seconds for each in share.samples]
        assert here.ends(everything, 0.0) == pytest.approx(ends)
        assert share.expected_seconds == pytest.approx(ends.max())
    assert result.lower_bound_instance_seconds <= result.expected_instance_seconds * (1 + 1e-9)


@given(samples=groups_of_equals, seconds=away, most=st.integers(1, 4), ratio=st.floats(1.0001, 4))
def test_a_deadline_is_kept_where_samples_are_away(samples, seconds, most, ratio):
    planner = Planner(with_away(samples, seconds), LATENCY, Limits(max_instances=most), 5.0)
    assert planner.within_deadline(planner.least_seconds * ratio).expected_seconds <= planner.least_seconds * ratio


def test_long_waits_make_few_instances_better():
    samples = [sample for prompt in range(8) for sample in group(prompt, 500, 500)]
    waits = [[replace(each, away_seconds=seconds) for each in samples] for seconds in (0.0, 60.0)]
    at_once, away = (plan("cost", each, LATENCY, Limits(max_instances=8), cost_weight=0.1) for each in waits)
    assert len(away.shares) < len(at_once.shares)


def test_a_resumed_sample_pays_for_its_own_tokens_and_shares_its_prompt():
    samples = [SampleLoad(0, 0, 100, 50), SampleLoad(0, 1, 140, 10)]
    fresh = [SampleLoad(0, 0, 100, 50), SampleLoad(0, 1, 100, 10)]
    resumed, anew = (plan("even", each, LATENCY, Limits()).expected_seconds for each in (samples, fresh))
    more_context = LATENCY.context_seconds * 40 * 10
    assert resumed - anew == pytest.approx(LATENCY.prefill_token_seconds * 40 + more_context)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": []}, "samples is empty"),
        ({"samples": [SampleLoad(3, 1, 10, -5)]}, "expected_tokens of prompt 3, sample 1, is -5"),
        ({"samples": [SampleLoad(3, 1, 10, math.nan)]}, "expected_tokens of prompt 3, sample 1, is nan"),
        (
            {"samples": [SampleLoad(3, 1, 10, 5, -1.0)]},
            "away_seconds of prompt 3, sample 1, is -1.0: .* 0 or more seconds",
        ),
        ({"samples": [SampleLoad(3, 1, -10, 5)]}, "prompt_tokens of prompt 3, sample 1, is -10"),
        ({"samples": [SampleLoad(3, 1, 900, 5)]}, "prompt 3 alone has 900 tokens: raise it to at least 901"),
        ({"cost_weight": 1.5}, "cost_weight is 1.5.*nearest is 1"),
        ({"cost_weight": -1}, "nearest is 0"),
        ({"startup_seconds": -1}, "start_seconds is -1"),
        ({"policy": "best"}, "choose one of even, cost"),
    ],
)
def test_bad_demands_are_named(change, message):
    demand = {"policy": "cost", "samples": group(0, 5), "latency": LATENCY, "limits": Limits(kv_tokens=900)} | change
    with pytest.raises(ValueError, match=message):
        plan(**demand)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_instances": 0}, "min_instances is 0"),
        ({"min_instances": 3, "max_instances": 2}, "max_instances is 2"),
        ({"kv_tokens": 0}, "kv_tokens is 0"),
        ({"max_batch": 0}, "max_batch is 0"),
    ],
)
def test_limits_that_make_no_sense_are_named(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


def test_an_impossible_deadline_names_the_nearest_possible_one():
    planner = Planner(group(0, 1000), LATENCY, Limits(max_instances=3))
    with pytest.raises(InfeasibleError, match=f"fastest plan on 3 instances takes {planner.least_seconds:g} seconds"):
        planner.within_deadline(1)


@pytest.mark.parametrize("values", [{"step_seconds": -1}, {"step_seconds": math.nan}, {"step_seconds": 0}])
def test_a_latency_that_makes_no_sense_is_named(values):
    with pytest.raises(ValueError, match="step_seconds is"):
        LinearLatency(**values)


def test_where_runaways_may_come_shares_are_sized_for_them_but_not_charged():
    samples = [sample for prompt in range(32) for sample in group(prompt, *[300] * 4)]
    limits = Limits(max_instances=16)
    plain = plan("cost", samples, LATENCY, limits, cost_weight=0.5)
    wary = plan("cost", samples, LATENCY, limits, cost_weight=0.5, tail_tokens=2000)
    assert len(wary.shares) < len(plain.shares)
    assert wary.expected_seconds >= LATENCY.step_seconds * 2000
    assert wary.expected_instance_seconds == pytest.approx(sum(share.expected_seconds for share in wary.shares))
    assert wary.expected_instance_seconds < plain.expected_instance_seconds


def test_a_tail_shorter_than_every_response_changes_nothing():
    samples = [sample for prompt, length in enumerate((300, 200, 100)) for sample in group(prompt, length, length)]
    short, none = (
        plan("cost", samples, LATENCY, Limits(max_instances=3), cost_weight=0.2, tail_tokens=tail) for tail in (50, 0)
    )
    assert short == none


def test_a_negative_tail_is_named():
    with pytest.raises(ValueError, match="tail_tokens is -1"):
        plan("cost", group(0, 5), LATENCY, Limits(), tail_tokens=-1)
