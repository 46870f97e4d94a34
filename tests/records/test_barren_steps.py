"""Steps that teach nothing: which they are, and when a person is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.records.barren_steps import barren_stretches, describe, is_due, taught_nothing, warning_now
from rlhfless_operator.records.record import StepRecord


def records(pattern: str, **metrics: float) -> list[StepRecord]:
    """A record for each letter: `x` taught nothing, `.` something, `?` does not say."""
    given_metrics = {"x": {"batch/teaching_groups": 0.0}, ".": {"batch/teaching_groups": 2.0}, "?": {}}
    return [
        StepRecord(step=number, metrics={**given_metrics[letter], "reward": 0.25, **metrics})
        for number, letter in enumerate(pattern, start=1)
    ]


@pytest.mark.parametrize(
    ("pattern", "stretches"),
    [
        ("", []),
        ("....", []),
        ("xx.xx", []),
        ("xxx", [[1, 2, 3]]),
        ("x.xxxx.xxx..", [[3, 4, 5, 6], [8, 9, 10]]),
        ("xx?xx", []),
        ("???", []),
    ],
)
def test_three_in_a_row_count(pattern: str, stretches: list[list[int]]) -> None:
    assert [[record.step for record in stretch] for stretch in barren_stretches(records(pattern))] == stretches


def test_an_evaluation_before_the_first_step_is_none() -> None:
    assert not taught_nothing(StepRecord(step=0, metrics={"batch/teaching_groups": 0.0}))


@given(st.text("x.", max_size=40))
def test_a_person_is_told_of_what_is_so_now(pattern: str) -> None:
    found = records(pattern)
    in_a_row = len(pattern) - len(pattern.rstrip("x"))
    assert (warning_now(found) is not None) == (in_a_row >= 3)
    assert is_due(found) == (in_a_row in (3, 6, 12, 24))


def test_the_words_tell_equal_rewards_from_samples_that_are_left_out() -> None:
    equal = describe(records("xxx"))
    assert equal.startswith(
        "steps 1 to 3 had nothing to learn from: all samples of each group got the same reward, 0.25 on"
    )
    left_out = describe(records("xxx", **{"batch/masked_samples": 8.0, "batch/samples": 8.0}))
    assert "every sample was excluded from the loss" in left_out
    assert "sampling.maxResponseTokens" in left_out
