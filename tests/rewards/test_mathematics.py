"""Mathematical equality, as math-verify understands it."""

import pytest

from rlhfless_functions.rewards.calls import Call
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.mathematics import math_scorer


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


def test_a_truth_that_is_no_mathematics_is_named() -> None:
    with pytest.raises(LookupError, match="'' of row 4 is not mathematics"):
        score("", "42")


def test_math_may_demand_that_the_response_ended() -> None:
    group = RewardGroup(4, "q", None, [r"\boxed{4}"] * 2, [[1]] * 2, ["stop", "truncated"], {"ground_truth": "4"})
    assert math_scorer(require_end=True)(group, Call(1)) == [1, 0]
    assert math_scorer()(group, Call(1)) == [1, 1]


def test_a_response_that_takes_too_long_scores_0_and_is_counted() -> None:
    call = Call(1)
    group = RewardGroup(4, "q", None, [r"\boxed{10^{10^{10}}}", "4"], [[1]] * 2, ["stop"] * 2, {"ground_truth": "4"})
    assert math_scorer(seconds=0.5)(group, call) == [0, 1]
    assert sum(number for name, number in call.metrics if name in ("timed_out", "crashed")) == 1
    assert len(call.metrics) == 4
