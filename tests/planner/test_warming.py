"""Keep-alive: the break-even between idle time and waiting."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.warming import keep_alive, kept_for

durations = st.lists(st.floats(0.1, 100), min_size=1, max_size=20)


def test_an_instance_is_kept_until_its_next_work_if_a_switch_costs_more():
    assert kept_for(30, 40) == 30 + 40, "late work is waited for as long as a switch costs"
    assert kept_for(40, 40) == 80
    assert kept_for(41, 40) == 0


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
