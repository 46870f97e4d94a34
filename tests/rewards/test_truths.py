"""What ground truths of any form mean."""

import pytest

from rlhfless_functions.rewards.truths import UnreadableTruthError, accepted, accepted_as_text


@pytest.mark.parametrize(
    ("truth", "texts"),
    [
        (3, ["3"]),
        (72.0, ["72", "72.0"]),
        (1e20, ["1e+20"]),
        (" a ", ["a"]),
        ([["a"], None, float("nan"), "a"], ["a"]),
        ((1, "1"), ["1"]),
        ({"answer": "x", "aliases": ["y"], "type": "WikipediaEntity"}, ["x", "y"]),
        ({"ground_truth": 0}, ["0"]),
    ],
)
def test_each_text_is_right(truth: object, texts: list[str]) -> None:
    assert accepted(truth) == texts


def test_a_list_as_json_text_is_a_list_only_where_the_reward_reads_it_so() -> None:
    assert accepted('["a", "b"]') == ['["a", "b"]']
    assert accepted_as_text('["a", "b"]') == ["a", "b"]
    assert accepted_as_text('["a", "b') == ['["a", "b']


@pytest.mark.parametrize("truth", [None, "", " ", float("nan"), "nan", [], [None], {}, {"target": None}])
def test_nothing_is_no_truth(truth: object) -> None:
    with pytest.raises(UnreadableTruthError, match="NaN or empty"):
        accepted(truth)
