"""The check of ground truths before training."""

import pytest

from rlhfless_functions.rewards.truth_check import unreadable_truths

TRUTHS = ["4", "x^2 + 1", float("nan"), "There are 3 apples and 5 pears", {"numbers": [1]}, "4", ["1", ""]]


def test_mathematics_names_what_it_can_not_read() -> None:
    found = dict(unreadable_truths("math", TRUTHS, 60))
    assert sorted(found) == [2, 3, 4]
    assert "NaN" in found[2] and "not mathematics as a whole" in found[3] and "keys numbers" in found[4]


def test_exact_match_reads_any_text() -> None:
    assert [position for position, _ in unreadable_truths("exact_match", TRUTHS, 60)] == [2, 4]


def test_without_time_the_rest_is_left_to_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    assert unreadable_truths("exact_match", TRUTHS, -1) == []
    assert "from row 0 on were not checked" in caplog.text
