"""The trend over prompt lengths: what a prompt's length says of its responses, and that noise says nothing."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.lengths import LengthPredictor, rank_correlation
from rlhfless_operator.planner.prompt_trend import PromptTrend


def trend_of(groups: list[tuple[int, float]], fade: float = 1.0) -> PromptTrend:
    trend = PromptTrend()
    for prompt_tokens, mean in groups:
        trend.observe(prompt_tokens, mean, fade)
    return trend


def test_responses_as_long_as_their_prompts_are_expected_so():
    trend = trend_of([(tokens, 3.0 * tokens) for tokens in range(10, 100)])
    assert trend.factor(80) / trend.factor(20) == pytest.approx(4, rel=0.01)


def test_lengths_that_have_nothing_to_do_with_prompts_hardly_change_the_estimate():
    random = np.random.default_rng(0)
    away = []
    for _ in range(200):
        groups = [(int(random.integers(20, 400)), float(random.lognormal(5, 0.8))) for _ in range(32)]
        away.append(abs(math.log(trend_of(groups).factor(200))))
    assert np.mean(away) < 0.05


def test_the_factors_of_all_prompts_have_a_mean_of_about_one():
    random = np.random.default_rng(1)
    prompts = random.lognormal(5, 0.4, 2000).astype(int)
    trend = trend_of([(int(tokens), float(tokens) ** 1.5 * random.lognormal(0, 0.2)) for tokens in prompts])
    assert np.mean([trend.factor(int(tokens)) for tokens in prompts]) == pytest.approx(1, rel=0.03)


def test_the_line_is_not_drawn_far_beyond_what_was_seen():
    trend = trend_of([(tokens, 3.0 * tokens) for tokens in range(90, 110)])
    assert trend.factor(10**9) == trend.factor(10**6) < 1.3
    assert trend.factor(1) > 0.7


def test_it_follows_the_newest_steps():
    rising = [(tokens, 2.0 * tokens) for tokens in range(10, 60)]
    falling = [(tokens, 2000.0 / tokens) for tokens in range(10, 60)]
    trend = trend_of(rising + falling, fade=0.9)
    assert trend.factor(50) < 1 < trend.factor(12)


@pytest.mark.parametrize(
    "groups", [[], [(5, 9.0)] * 3, [(50, float(mean)) for mean in range(1, 30)], [(0, 3.0), (9, 0.0)]]
)
def test_prompts_of_one_length_and_few_groups_say_nothing(groups: list[tuple[int, float]]):
    assert trend_of(groups).factor(17) == 1.0
    assert trend_of(groups).variance == 0.0


@given(
    st.lists(st.tuples(st.integers(-1, 10**9), st.floats(0, 1e9)), max_size=40),
    st.integers(-1, 10**12),
    st.floats(0.01, 1),
)
def test_a_factor_is_always_a_positive_number_and_survives_json(
    groups: list[tuple[int, float]], prompt_tokens: int, fade: float
):
    trend = trend_of(groups, fade)
    restored = PromptTrend.from_state(json.loads(json.dumps(trend.state())))
    assert restored.factor(prompt_tokens) == trend.factor(prompt_tokens) > 0
    assert math.isfinite(trend.factor(prompt_tokens))
    assert trend.variance >= 0


def test_new_prompts_are_told_apart_by_their_lengths_and_are_less_uncertain():
    random = np.random.default_rng(2)
    plain, trended = LengthPredictor(longest=100_000), LengthPredictor(longest=100_000)
    for prompt in range(256):
        tokens = int(random.integers(50, 400))
        lengths = [int(length) for length in tokens * random.lognormal(0, 0.3, 8)]
        plain.observe(prompt, lengths)
        trended.observe(prompt, lengths, tokens)
    unseen = np.arange(50, 400, 10)
    estimates = [trended.predict(1000 + int(tokens), int(tokens)) for tokens in unseen]
    assert rank_correlation(unseen.astype(float), np.array([each.mean for each in estimates])) == pytest.approx(1)
    assert all(
        each.mean == pytest.approx(1.046 * tokens, rel=0.1) for each, tokens in zip(estimates, unseen, strict=True)
    )
    relative = plain.predict(1000).spread / plain.predict(1000).mean
    assert all(each.spread / each.mean < 0.6 * relative and each.seen == 0 for each in estimates)


def test_an_estimate_stays_within_the_longest_response():
    predictor = LengthPredictor(longest=128)
    for prompt in range(64):
        predictor.observe(prompt, [min(127, 2 + prompt * 2)], 10 + prompt)
    assert predictor.predict(999, 10_000).mean <= 128
