"""Length prediction: what a prompt's past and everything that finished lately say of its next responses."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.lengths import LengthEstimate, LengthPredictor, assess, rank_correlation

visits = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(0, 4096), min_size=1, max_size=8)), min_size=1, max_size=20
)


def test_before_anything_has_finished_the_default_is_the_answer_and_says_so():
    assert LengthPredictor(default_tokens=300).predict(7) == LengthEstimate(300, 150, 0)


def test_the_first_visit_is_taken_whole():
    predictor = LengthPredictor(weight=0.25)
    predictor.observe(3, [100, 300])
    assert predictor.predict(3) == LengthEstimate(200, 100, 1)


def test_later_visits_move_the_mean_by_the_weight():
    predictor = LengthPredictor(weight=0.25)
    predictor.observe(3, [100, 100])
    predictor.observe(3, [200, 200])
    estimate = predictor.predict(3)
    assert estimate.mean == 125 and estimate.seen == 2
    # Both visits were without spread; what is left is the shift between them: sqrt(0.75 · 0.25) · 100.
    assert estimate.spread == pytest.approx(100 * np.sqrt(0.1875))


def test_a_new_prompt_gets_the_distribution_of_what_has_finished_in_this_step_too():
    predictor = LengthPredictor()
    predictor.observe(1, [100, 200])
    assert predictor.predict(2) == LengthEstimate(150, 50, 0)
    predictor.observe(3, [1000, 1000])
    assert predictor.predict(2).mean > 500


def test_runaways_are_counted_apart():
    predictor = LengthPredictor(longest=1000)
    predictor.observe(1, [100, 200, 300, 1000])
    assert predictor.predict(1) == LengthEstimate(200, pytest.approx(81.65, abs=0.01), 1, 0.25)
    assert predictor.predict(2).runaways == 0.25
    predictor.observe(2, [1000, 1000])
    assert predictor.predict(2).mean == 200
    assert predictor.predict(2).runaways == pytest.approx(1 / 3 * 1 + 2 / 3 * 0.5, abs=0.001)


def test_the_prior_forgets():
    predictor = LengthPredictor(half_life=10)
    predictor.observe(1, [1000] * 10)
    predictor.observe(2, [100] * 100)
    assert predictor.prior().mean == pytest.approx(100, abs=2)


def test_an_empty_visit_changes_nothing():
    predictor = LengthPredictor()
    predictor.observe(1, [])
    assert predictor.predict(1).seen == 0


@given(visits, st.floats(0.05, 1))
def test_state_survives_json_and_goes_on_the_same(observed, weight):
    predictor = LengthPredictor(weight=weight, half_life=50)
    for prompt, lengths in observed:
        predictor.observe(prompt, lengths)
    restored = LengthPredictor.from_state(json.loads(json.dumps(predictor.state())))
    for each in (predictor, restored):
        each.observe(2, [17, 99])
    assert [restored.predict(prompt) for prompt in range(7)] == [predictor.predict(prompt) for prompt in range(7)]


@given(visits)
def test_estimates_stay_within_what_was_observed(observed):
    predictor = LengthPredictor()
    for prompt, lengths in observed:
        predictor.observe(prompt, lengths)
    for prompt in {prompt for prompt, _ in observed}:
        seen = [length for other, lengths in observed if other == prompt for length in lengths]
        assert min(seen) - 1e-6 <= predictor.predict(prompt).mean <= max(seen) + 1e-6


def test_quantiles_of_a_group_have_about_its_mean_and_are_longest_first():
    lengths = LengthEstimate(mean=200, spread=80, seen=1).quantiles(64)
    assert lengths == sorted(lengths, reverse=True)
    assert np.mean(lengths) == pytest.approx(200, rel=0.02)
    assert np.std(lengths) == pytest.approx(80, rel=0.1)


def test_quantiles_without_a_spread_are_the_mean():
    assert LengthEstimate(mean=50, spread=0, seen=3).quantiles(3) == [50, 50, 50]


@pytest.mark.parametrize("tokens", [0, 100, 400, 1000])
def test_what_remains_is_the_conditional_mean(tokens):
    random = np.random.default_rng(0)
    variance = np.log1p(0.25)
    lengths = random.lognormal(np.log(400) - variance / 2, np.sqrt(variance), 400_000)
    survivors = lengths[lengths > tokens]
    remaining = LengthEstimate(mean=400, spread=200, seen=1).outlook(tokens, longest=100_000)[0]
    assert remaining == pytest.approx(survivors.mean() - tokens, rel=0.03)


def test_a_response_far_past_its_prediction_is_likely_a_runaway():
    estimate = LengthEstimate(mean=200, spread=80, seen=1, runaways=0.02)
    remaining = [estimate.outlook(tokens, longest=2048)[0] for tokens in (0, 300, 900)]
    assert remaining[0] == pytest.approx(0.98 * 200 + 0.02 * 2048)
    assert remaining[1] > 300
    assert remaining[2] == pytest.approx(2048 - 900, rel=0.05)


@given(st.floats(0, 5000), st.floats(0, 5000), st.integers(0, 5000), st.floats(0, 1))
def test_what_remains_is_never_beyond_the_longest_response(mean, spread, tokens, runaways):
    remaining = LengthEstimate(mean, spread, 1, runaways).outlook(tokens, 4096)[0]
    assert 0 <= remaining <= max(0, 4096 - tokens)


def test_rank_correlation_shares_ranks_among_ties():
    # By hand: ranks 1.5, 1.5, 3 against 1, 2, 3 give 1.5 / sqrt(1.5 · 2).
    assert rank_correlation(np.array([5.0, 5, 9]), np.array([1.0, 2, 3])) == pytest.approx(0.8660254)


@pytest.mark.parametrize(("first", "second"), [([1.0], [2.0]), ([1.0, 1.0], [1.0, 2.0])])
def test_rank_correlation_of_what_does_not_vary_is_unknown(first, second):
    assert rank_correlation(np.array(first), np.array(second)) is None


def test_a_report_compares_predictions_with_outcomes():
    estimates = {1: LengthEstimate(100, 0, 2), 2: LengthEstimate(300, 0, 0), 3: LengthEstimate(50, 0, 1)}
    report = assess(estimates, {1: [50, 100], 2: [300, 600]})
    assert (report.prompts, report.seen) == (2, 1)
    assert report.prompt_rank_correlation == pytest.approx(1)
    assert report.relative_error == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    assert report.bias == pytest.approx(800 / 1050 - 1)


def test_a_report_on_nothing_knows_nothing():
    report = assess({1: LengthEstimate(1, 0, 0)}, {})
    assert report.prompts == 0 and report.relative_error is None and report.rank_correlation is None


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"weight": 0}, "weight"), ({"default_tokens": 0}, "default_tokens"), ({"half_life": 0}, "half_life")],
)
def test_settings_that_make_no_sense_are_named(arguments, field):
    with pytest.raises(ValueError, match=field):
        LengthPredictor(**arguments)


def test_a_negative_length_is_named():
    with pytest.raises(ValueError, match="prompt 4 contain -2"):
        LengthPredictor().observe(4, [3, -2])
