"""Answers that were cut off, and truths that are none; `pairs.jsonl` has the other cases by kind."""

import pytest

from rlhfless_functions.rewards.mathematics.answers import answer_of, truth_of
from rlhfless_functions.rewards.mathematics.equality import same


def is_right(truth: str, response: str, truncated: bool = False) -> bool:
    expected, answer = truth_of(truth), answer_of(response, truncated)
    assert expected is not None, truth
    return answer is not None and same(expected, answer)


@pytest.mark.parametrize("cut", [r"\boxed{4", "<answer>4", r"\boxed{7}. No: \boxed{4", r"<answer>7</answer> <answer>4"])
def test_an_open_box_or_tag_counts_unless_the_response_was_cut_off(cut: str) -> None:
    assert is_right("4", cut)
    assert not is_right("4", cut, truncated=True) and not is_right("7", cut, truncated=True)


@pytest.mark.parametrize(
    "truth",
    ["There are 3 apples and 5 pears", "5 feet 3 inches", "1 2", "x +", "((1)", "2 < 3 apples", "$1$, then $2 + $"],
)
def test_a_truth_that_is_not_mathematics_as_a_whole_is_not_read(truth: str) -> None:
    assert truth_of(truth) is None
