"""How far apart steps are where rollouts go ahead of the learner: bounds, and cases that can be counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.steps_ahead import least_period, period

SECONDS = st.floats(0.1, 100)
SHARES = st.lists(SECONDS, min_size=1, max_size=8)


@given(SHARES, SECONDS)
def test_a_synchronous_step_takes_its_longest_share_and_learning(shares: list[float], learning: float) -> None:
    found = period(shares, learning, 0)
    assert found.seconds == pytest.approx(max(shares) + learning)
    assert found.staleness == 0


@given(SHARES, SECONDS, st.integers(0, 4))
def test_no_step_takes_less_than_the_bound(shares: list[float], learning: float, most: int) -> None:
    # Over a part of the steps, what was begun before it may be missing from it: the bound is one of long runs.
    found = period(shares, learning, most)
    slack = (sum(shares) + learning) / 32 * (most + 1)
    assert found.seconds >= least_period(shares, learning, most) - slack - 1e-9


@given(SHARES, SECONDS, st.integers(0, 4))
def test_going_ahead_makes_no_step_longer(shares: list[float], learning: float, most: int) -> None:
    # Nothing begins later where weights may be older; sums of seconds are rounded.
    assert period(shares, learning, most + 1).seconds <= period(shares, learning, 0).seconds * (1 + 1e-9)


@given(SHARES, SECONDS, st.integers(0, 4))
def test_staleness_is_at_most_what_is_allowed(shares: list[float], learning: float, most: int) -> None:
    found = period(shares, learning, most)
    assert 0 <= found.staleness <= most
    assert 0 < found.generation_busy <= 1 + 1e-9 + (most + 1) / 16
    assert 0 < found.learning_busy <= 1 + 1e-9


def test_equal_shares_and_equal_learning_take_half_the_time() -> None:
    found = period([10.0, 10.0], 10.0, 1)
    assert found.seconds == pytest.approx(10.0)
    assert (found.generation_busy, found.learning_busy, found.staleness) == pytest.approx((1.0, 1.0, 1.0))


def test_a_step_waits_for_weights_where_one_share_is_long() -> None:
    # The long share and learning take 40 s, and two steps may be under way.
    assert period([30.0, 5.0], 10.0, 1).seconds == pytest.approx(20.0)
    assert least_period([30.0, 5.0], 10.0, 1) == 20.0


def test_instances_that_are_busy_all_the_time_are_the_bound_with_enough_steps_ahead() -> None:
    found = period([30.0, 10.0], 1.0, 4)
    assert found.seconds == pytest.approx(20.0, rel=0.05)
