"""Looks of all rollouts of a process: together they take a fifth of its time at most."""

from contextlib import ExitStack

import pytest

from rlhfless_operator.training.actors.looks import one_more_rollout, pause_after


@pytest.mark.parametrize("rollouts", [0, 1, 10, 1000])
def test_the_looks_of_all_rollouts_take_a_fifth_of_the_time_at_most(rollouts: int) -> None:
    with ExitStack() as under_way:
        for _ in range(rollouts):
            under_way.enter_context(one_more_rollout())
        assert max(1, rollouts) * 0.006 / pause_after(0.006) == pytest.approx(0.2)
    assert pause_after(0.006) == pytest.approx(0.03), "rollouts that have ended take none"
