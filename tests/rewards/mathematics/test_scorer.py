"""Mathematical equality, as math-verify understands it."""

import pytest

from rlhfless_functions.rewards.calls import Call
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.mathematics.scorer import math_scorer


def score(truth: object, *completions: str) -> list[float]:
    size = len(completions)
    return math_scorer()(
        RewardGroup(4, "q", None, list(completions), [[1]] * size, ["stop"] * size, {"ground_truth": truth}), Call(1)
    )


@pytest.mark.parametrize("truth", [r"\frac{1}{2}", r"$\frac12$", "1/2", 0.5, r"\boxed{0.5}"])
def test_equal_numbers_are_equal_however_they_are_written(truth: object) -> None:
    right = [r"so it is $\boxed{\frac{1}{2}}$", "The answer is 0.5", r"\(\frac{2}{4}\)"]
    wrong = [r"\boxed{2}", "I do not know", ""]
    assert score(truth, *right, *wrong) == [1, 1, 1, 0, 0, 0]


def test_the_last_boxed_expression_counts() -> None:
    responses = [
        r"\boxed{3}. Wait, no. \boxed{7}",
        r"\boxed{7} since 3 + 4 is not 9",
        "1, 2, 3, so 7",
        r"\boxed{7} \boxed{3}",
    ]
    assert score("7", *responses) == [1, 1, 1, 0]


def test_several_boxes_may_hold_one_answer_together() -> None:
    assert score(r"\{3, 7\}", r"$x=\boxed{3}$ or $x=\boxed{7}$") == [1]


def test_expressions_and_sets_are_compared_as_such() -> None:
    assert score(r"(x+1)^2", r"$x^2 + 2x + 1$") == [1]
    assert score(r"\{1, 2\}", r"$\{2, 1\}$") == [1]


@pytest.mark.parametrize("truth", ["", float("nan"), "nan", [], [None], {"target": []}])
def test_nan_and_nothing_are_no_truths(truth: object) -> None:
    with pytest.raises(LookupError, match="of row 4 is NaN or empty"):
        score(truth, "42")


def test_a_truth_that_is_no_mathematics_as_a_whole_is_named() -> None:
    with pytest.raises(
        LookupError, match="'There are 3 apples and 5 pears' of row 4 is not mathematics as a whole: write the ans"
    ):
        score("There are 3 apples and 5 pears", "5")
    with pytest.raises(LookupError, match="is a dict whose keys numbers mean nothing to this reward"):
        score({"target": 24, "numbers": [4, 6]}, "24")


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        (72.0, r"\boxed{72}", r"\boxed{2}"),
        (0.5, r"\boxed{\frac12}", r"\boxed{5}"),
        ([1, 2], r"\boxed{2}", r"\boxed{3}"),
        (["1/2", "0.6"], r"\boxed{0.5}", r"\boxed{2}"),
        (True, r"\boxed{\text{True}}", r"\boxed{1}"),
        (False, "The answer is no.", "The answer is yes."),
        ({"target": ["1/2"]}, r"\boxed{0.5}", r"\boxed{2}"),
        ({"value": "7", "aliases": ["seven"]}, "The answer is seven.", "The answer is eight."),
        ('["\\\\frac{1}{2}", "2"]', r"\boxed{0.5}", r"\boxed{1}"),
        ("[1, 2]", r"\boxed{[1, 2]}", r"\boxed{2}"),
    ],
)
def test_a_truth_of_another_form_means_what_its_dataset_means(truth: object, right: str, wrong: str) -> None:
    assert score(truth, right, wrong) == [1, 0]


def test_nothing_of_the_thoughts_counts() -> None:
    right = [
        r"<think>\boxed{41}</think>\boxed{42}",
        "41, no\n</think>\nThe answer is 42.",
        "<reasoning>4</reasoning>42",
    ]
    wrong = [r"<think>\boxed{42}</think>Who knows?", "<think>It is 42", r"\boxed{42}</think>", "<think>42</think>41"]
    assert score("42", *right, *wrong) == [1, 1, 1, 0, 0, 0, 0]


def test_thoughts_that_the_prompt_begins_are_thoughts() -> None:
    responses = ["It is 42", "41?</think>42", "42</think>41"]
    group = RewardGroup(0, "q <think>\n", None, responses, [[1]] * 3, ["stop"] * 3, {"ground_truth": "42"})
    assert math_scorer()(group, Call(1)) == [0, 1, 0]


def test_a_box_that_was_cut_off_is_no_answer() -> None:
    responses = [r"\boxed{4", r"\boxed{4}"] * 2
    ends = ["stop", "stop", "truncated", "truncated"]
    group = RewardGroup(0, "q", None, responses, [[1]] * 4, ends, {"ground_truth": "4"})
    assert math_scorer()(group, Call(1)) == [1, 1, 0, 1]


def test_math_may_demand_that_the_response_ended() -> None:
    group = RewardGroup(4, "q", None, [r"\boxed{4}"] * 2, [[1]] * 2, ["stop", "truncated"], {"ground_truth": "4"})
    assert math_scorer(require_end=True)(group, Call(1)) == [1, 0]
    assert math_scorer()(group, Call(1)) == [1, 1]


def test_a_response_that_takes_too_long_scores_0_and_is_counted() -> None:
    call = Call(1)
    group = RewardGroup(4, "q", None, [r"\boxed{10^{10^{10}}}", "4"], [[1]] * 2, ["stop"] * 2, {"ground_truth": "4"})
    assert math_scorer(seconds=0.5)(group, call) == [0, 1]
    assert sum(number for name, number in call.metrics if name in ("timed_out", "crashed")) == 1
    assert [name for name, _ in call.metrics].count("timed_out") == 2
