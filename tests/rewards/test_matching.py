"""Exact match, format, and length shaping."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.rewards.calls import Call
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.length import soft_overlong
from rlhfless_functions.rewards.matching import exact_match_scorer, format_scorer


def make_group(*completions: str, truth: object = "42", reasons: list[str] | None = None) -> RewardGroup:
    ids = [[1]] * len(completions)
    columns = {} if truth is None else {"ground_truth": truth}
    return RewardGroup(0, "q", None, list(completions), ids, reasons or ["stop"] * len(completions), columns)


def test_exact_match_compares_the_whole_response_without_surrounding_space() -> None:
    score = exact_match_scorer(None, require_end=False)
    assert score(make_group("42", " 42\n", "42.", "", "x42"), Call(1)) == [1, 1, 0, 0, 0]


def test_exact_match_takes_the_last_match_of_its_pattern() -> None:
    score = exact_match_scorer(r"#\s*(\d+)", require_end=False)
    assert score(make_group("#41 #42", "#42 #41", "42", "so\n# 42 ."), Call(1)) == [1, 0, 0, 1]
    assert exact_match_scorer(r"\d+", require_end=False)(make_group("first 4, then 42"), Call(1)) == [1]


def test_exact_match_reads_truths_that_are_numbers() -> None:
    assert exact_match_scorer(None, require_end=False)(make_group("42", truth=42), Call(1)) == [1]


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        (72.0, ["72", "72.0"], ["7", "72.5"]),
        (0.5, ["0.5"], ["0", "5"]),
        (["Paris", "paris"], ["Paris", "paris"], ["Rome", "['Paris', 'paris']"]),
        ([1, 2.0], ["1", "2"], ["3", "[1, 2.0]"]),
        (True, ["True", "true", "yes"], ["1", "False"]),
        (False, ["False", "No"], ["0", "true"]),
        ({"target": ["a", "b"]}, ["a", "b"], ["target"]),
        ({"text": ["in 1999"], "answer_start": [3]}, ["in 1999"], ["3"]),
        ('["a", "b"]', ['["a", "b"]'], ["a"]),
        ("72.0", ["72.0"], ["72"]),
    ],
)
def test_exact_match_reads_truths_of_any_form(truth: object, right: list[str], wrong: list[str]) -> None:
    score = exact_match_scorer(None, require_end=False)
    assert score(make_group(*right, *wrong, truth=truth), Call(1)) == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize("truth", [float("nan"), "NaN", "", [], {"numbers": [1]}])
def test_exact_match_refuses_truths_that_are_none(truth: object) -> None:
    with pytest.raises(LookupError, match="of row 0 is"):
        exact_match_scorer(None, require_end=False)(make_group("nan", truth=truth), Call(1))


def test_exact_match_takes_nothing_of_the_thoughts() -> None:
    responses = ["<think>41</think> 42", "<think>42</think> 41", "<think>42", "#42</think> none", "#41</think>#42"]
    assert exact_match_scorer(None, require_end=False)(make_group(*responses), Call(1)) == [1, 0, 0, 0, 0]
    assert exact_match_scorer(r"\d+", require_end=False)(make_group(*responses), Call(1)) == [1, 0, 0, 0, 1]
    whole = exact_match_scorer(r"^<think>.*</think>\s*(.*)", require_end=False)
    assert whole(make_group(*responses), Call(1)) == [1, 0, 0, 0, 0]
    begun = replace(make_group("so</think>42", "42", "<think>42"), text="2 · 21? <think>\n")
    assert whole(begun, Call(1)) == [1, 0, 0]


def test_exact_match_may_demand_that_the_response_ended() -> None:
    group = make_group("42", "42", reasons=["stop", "truncated"])
    assert exact_match_scorer(None, require_end=True)(group, Call(1)) == [1, 0]


def test_without_a_ground_truth_the_column_is_asked_for() -> None:
    with pytest.raises(LookupError, match=r"data\.groundTruthColumn"):
        exact_match_scorer(None, require_end=False)(make_group("42", truth=None), Call(1))


def test_format_must_match_the_whole_response() -> None:
    score = format_scorer(r"<think>.*</think>\s*<answer>.*</answer>")
    good = "<think>two\nlines</think>\n<answer>4</answer>"
    assert score(make_group(good, good + ".", "<answer>4</answer>"), Call(1)) == [1, 0, 0]


@pytest.mark.parametrize("pattern", [r"<think>\n.*</think>.*", r"<think>.*?</think>\s*[^<]*", r"[^<]*</think>.*"])
def test_thoughts_that_the_prompt_begins_are_the_beginning_of_the_response(pattern: str) -> None:
    group = make_group("so\n</think>\n4", "4", "<think>\nso</think>\n4")
    begun = replace(group, text="q<think>\n")
    assert format_scorer(pattern)(begun, Call(1)) == [1, 0, 0]


@given(longest=st.integers(1, 5000), buffer=st.integers(1, 5000), length=st.integers(0, 5000))
def test_overlong_punishment_is_dapos(longest: int, buffer: int, length: int) -> None:
    # arXiv 2503.14476, equation 13
    expected_length = longest - buffer
    if length <= expected_length:
        expected = 0.0
    elif length <= longest:
        expected = (expected_length - length) / buffer
    else:
        expected = -1.0
    assert soft_overlong(length, longest, buffer) == expected
