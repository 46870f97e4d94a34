"""What a run paid beside the least in hindsight, from its ledger's spans."""

import pytest

from rlhfless_operator.records.record import SpanRecord
from rlhfless_operator.report.hindsight import Hindsight, hindsight, total


def spans(instance, stage, *states):
    """Spans one after the other: (state, start, end)."""
    return [
        SpanRecord(instance=instance, stage=stage, state=state, start=start, end=end) for state, start, end in states
    ]


def test_keeping_through_short_gaps_is_the_least():
    states = [("starting", 0, 4), ("busy", 4, 10), ("idle", 10, 12), ("busy", 12, 20), ("draining", 20, 23)]
    assert hindsight(spans("a", "generation", *states)) == {"generation": Hindsight(23.0, 23.0)}


def test_keeping_through_a_long_gap_costs_more_than_letting_go():
    states = [("starting", 0, 4), ("busy", 4, 10), ("idle", 10, 50), ("busy", 50, 60), ("draining", 60, 63)]
    found = hindsight(spans("a", "learning", *states))["learning"]
    # Two starts and two drains instead of forty seconds.
    assert found == Hindsight(63.0, 16 + 2 * 7)
    assert found.ratio == pytest.approx(2.1)


def test_letting_go_before_a_short_gap_costs_more_than_keeping():
    first = spans("a", "generation", ("starting", 0, 4), ("busy", 4, 10), ("draining", 10, 13))
    second = spans("b", "generation", ("starting", 8, 12), ("busy", 12, 20), ("draining", 20, 23))
    assert hindsight([*first, *second])["generation"] == Hindsight(28.0, 14 + 2 + 7)


def test_what_comes_before_work_and_after_it_is_no_part_of_the_least():
    states = [("starting", 0, 2), ("idle", 2, 9), ("busy", 9, 10), ("idle", 10, 15), ("draining", 15, 16)]
    assert hindsight(spans("a", "preparation", *states))["preparation"] == Hindsight(16.0, 4.0)


def test_an_instance_that_never_worked_was_not_needed():
    worked = spans("a", "generation", ("starting", 0, 4), ("busy", 4, 10))
    idled = spans("b", "generation", ("starting", 0, 4), ("idle", 4, 10))
    assert hindsight([*worked, *idled])["generation"] == Hindsight(20.0, 10.0)


def test_work_that_goes_on_through_the_end_of_a_step_is_one_piece():
    split = spans("a", "generation", ("starting", 0, 4), ("busy", 4, 7), ("busy", 7, 9), ("draining", 9, 10))
    assert hindsight(split) == {"generation": Hindsight(10.0, 10.0)}


def test_stages_add_up_in_the_order_of_a_step():
    found = hindsight(
        [*spans("l", "learning", ("busy", 0, 5)), *spans("g", "generation", ("busy", 0, 3), ("idle", 3, 4))]
    )
    assert list(found) == ["generation", "learning"]
    assert total(found) == Hindsight(9.0, 8.0)


def test_nothing_is_known_of_a_run_without_a_ledger():
    assert hindsight([]) == {}
    assert total({}).ratio == 1.0
