"""Warming and keep-alive: the break-even between idle time and waiting."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.warming import keep_alive, wake_time

durations = st.lists(st.floats(0.1, 100), min_size=1, max_size=20)


def test_with_no_history_instances_are_woken_at_once():
    assert wake_time([], 30, instances=4, late_price=1) == 0


def test_dear_delay_means_the_shortest_duration():
    assert wake_time([50, 60, 70], 30, instances=1, late_price=1000) == 20


def test_dear_idling_means_the_longest_duration():
    assert wake_time([50, 60, 70], 30, instances=1000, late_price=1) == 40


def test_a_start_up_longer_than_the_stage_begins_with_it():
    assert wake_time([10, 10], 30, instances=1, late_price=1) == 0


@given(durations, st.floats(0, 50), st.integers(1, 16), st.floats(0, 64))
def test_no_other_moment_costs_less(history, startup, instances, late_price):
    def cost(after):
        ready = after + startup
        return sum(instances * max(0, d - ready) + late_price * max(0, ready - d) for d in history)

    chosen = wake_time(history, startup, instances=instances, late_price=late_price)
    assert cost(chosen) <= min(cost(max(0, d - startup)) for d in history) + 1e-6


def test_with_no_history_an_instance_is_kept_for_a_switch():
    assert keep_alive([], 40) == 40
    assert keep_alive([], 40, longest=10) == 10


def test_short_gaps_are_bridged_and_long_ones_are_not():
    assert keep_alive([500, 600], 40) == 0
    assert keep_alive([5, 600, 5, 600], 40) == pytest.approx(5 * 1.25), "the next short one may be a little longer"


def test_beyond_the_longest_gap_an_instance_is_kept_for_a_switch_more():
    assert keep_alive([5, 6, 5], 40) == 46
    assert keep_alive([5, 6, 5], 40, longest=10) == 10


@given(st.lists(st.floats(3, 5), min_size=48, max_size=48))
def test_gaps_that_vary_a_little_never_let_an_instance_go(gaps):
    seen: list[float] = []
    for gap in gaps:
        assert gap <= keep_alive(seen, 15)
        seen.append(gap)


@given(durations, st.floats(0, 50), st.floats(0, 120))
def test_no_other_limit_costs_much_less(gaps, switch, longest):
    def cost(limit):
        return sum(min(gap, limit) + (switch if gap > limit else 0) for gap in gaps)

    chosen = keep_alive(gaps, switch, longest=longest)
    assert 0 <= chosen <= longest
    assert cost(chosen) <= 1.25 * min(cost(min(limit, longest)) for limit in [0, *gaps, math.inf]) + 1e-9


@pytest.mark.parametrize("bad", [{"startup_seconds": -1}, {"late_price": -1}, {"instances": 0}])
def test_numbers_that_make_no_sense_are_refused(bad):
    arguments = {"startup_seconds": 1, "late_price": 1, "instances": 1} | bad
    with pytest.raises(ValueError, match=next(iter(bad))):
        wake_time([1], arguments.pop("startup_seconds"), **arguments)
