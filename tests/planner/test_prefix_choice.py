"""Whether instances are started with what it takes to share prefixes."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.prefix_choice import is_worth_sharing

gains = st.lists(st.floats(-10, 10), min_size=1, max_size=8)


@given(gains)
def test_the_first_choice_is_what_the_gains_say(found: list[float]) -> None:
    chosen = is_worth_sharing(None, found, steps_left=1, change_seconds=1e9)
    assert chosen == (sum(found) > 0)


@given(st.booleans(), gains, st.integers(1, 100), st.floats(0, 1000))
def test_instances_start_again_only_where_the_steps_that_are_left_gain_more_than_that(
    now: bool, found: list[float], steps_left: int, change_seconds: float
) -> None:
    mean = sum(found) / len(found)
    chosen = is_worth_sharing(now, found, steps_left=steps_left, change_seconds=change_seconds)
    if chosen != now:
        assert chosen == (mean > 0)
        assert abs(mean) * steps_left > change_seconds * (1 - 1e-9)
    # A choice that was just made stands.
    assert is_worth_sharing(chosen, found, steps_left=steps_left, change_seconds=change_seconds) == chosen


@given(st.booleans(), gains)
def test_nothing_changes_in_the_last_step_of_a_job_whose_instances_take_long_to_start(
    now: bool, found: list[float]
) -> None:
    assert is_worth_sharing(now, found, steps_left=1, change_seconds=1000.0) == now


def test_nothing_is_shared_while_nothing_is_known() -> None:
    assert not is_worth_sharing(None, [], steps_left=10, change_seconds=0.0)
