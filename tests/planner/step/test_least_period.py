"""How far apart steps are at least where rollouts go ahead of the learner: cases that can be counted by hand.

`tests/simulator/asynchronous/test_long_run.py` has simulated jobs beside it.
"""

import pytest

from rlhfless_operator.planner.step.least_period import least_period


def test_a_synchronous_step_takes_its_longest_share_and_learning() -> None:
    assert least_period([30.0, 5.0], 10.0, 0) == 40.0


def test_a_step_waits_for_weights_where_one_share_is_long() -> None:
    # The long share and learning take 40 s, and two steps may be under way.
    assert least_period([30.0, 5.0], 10.0, 1) == 20.0


def test_instances_that_are_busy_all_the_time_are_the_bound_with_enough_steps_ahead() -> None:
    assert least_period([30.0, 10.0], 1.0, 4) == 20.0


@pytest.mark.parametrize(("learning", "preparation", "least"), [(25.0, 1.0, 25.0), (1.0, 50.0, 50.0)])
def test_the_slowest_stage_is_the_bound(learning: float, preparation: float, least: float) -> None:
    assert least_period([30.0, 10.0], learning, 4, preparation=preparation) == least


def test_a_learner_that_begins_with_the_first_groups_holds_a_response_up_for_the_last_ones_alone():
    assert least_period([30.0, 5.0], 10.0, 0, lag=2.0) == 32.0
    assert least_period([30.0, 5.0], 18.0, 1, lag=2.0) == 18.0
