"""When a learner that takes groups as they come begins, and when it lets go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.step.overlap import TrainerPlan, run_trainer
from rlhfless_operator.planner.step.pace import LearnerPace, begins_unknown, run_paced, still_expected

NOTHING = np.zeros(0)
PACE = LearnerPace(start_seconds=2.0, switch_seconds=4.0)


def test_it_begins_as_late_as_the_end_allows() -> None:
    expected, work = np.array([10.0, 20.0]), np.array([3.0, 1.0])
    # The last group is done at 21, and 5 s of work and 2 s of start come before.
    assert PACE.begins(0.0, 1.0, expected, work) == pytest.approx(21 - 5 - 2)
    assert PACE.begins(16.0, 1.0, np.array([18.0, 20.0]), work) == 16.0, "what should have begun begins"


def test_it_begins_at_once_on_all_that_there_is() -> None:
    assert PACE.begins(3.0, 0.5, NOTHING, NOTHING) == 3.0


@given(now=st.floats(0.0, 1e3), start=st.floats(0.001, 60.0), backlog=st.floats(0.0, 1e3), work=st.floats(0.0, 1e3))
def test_what_should_have_begun_begins_at_this_very_moment(
    now: float, start: float, backlog: float, work: float
) -> None:
    """By rounding it began a little later, time and again, and a simulation never ended."""
    assert LearnerPace(start, 0.0).begins(now, backlog, np.array([now]), np.array([work])) == now


def test_where_nothing_is_known_it_begins_with_half_of_the_groups() -> None:
    assert [begins_unknown(ready, 5) for ready in (0, 2, 3, 5)] == [False, False, True, True]


def test_it_begins_at_once_on_a_backlog_of_several_starts() -> None:
    far = np.array([1000.0])
    assert PACE.begins(0.0, 5.9, far, np.ones(1)) > 900
    assert PACE.begins(0.0, 6.0, far, np.ones(1)) == 0.0


def test_it_lets_go_where_the_next_group_is_far_and_not_where_it_is_near() -> None:
    assert PACE.lets_go(10.0, np.array([14.1, 30.0]))
    assert not PACE.lets_go(10.0, np.array([13.9, 30.0]))
    assert not PACE.lets_go(10.0, NOTHING), "there is only the update left"
    assert not PACE.lets_go(10.0, np.array([14.1, 30.0]), again=0.2), "what is lost with it is done again"


def test_a_forecast_that_has_failed_keeps_it_no_longer_than_a_switch() -> None:
    assert still_expected(12.0, np.array([10.0, 20.0])).tolist() == [14.0, 20.0]
    assert not PACE.lets_go(13.9, np.array([10.0]))
    assert PACE.lets_go(14.1, np.array([10.0]))


def test_what_is_late_is_expected_no_later_than_the_longest_response() -> None:
    """A group that is 12 s late most likely has a response of full length, which ends with the last of all."""
    expected = np.array([10.0, 21.0, 30.0])
    assert still_expected(22.0, expected, 30.0).tolist() == [30.0, 23.0, 30.0]
    assert still_expected(31.0, expected, 30.0).tolist() == [32.0, 32.0, 32.0], "the last of all is late itself"
    slow = LearnerPace(2.0, 4.0, last_seconds=30.0)
    work = np.array([1.0])
    assert slow.begins(22.0, 1.0, np.array([10.0]), work) == pytest.approx(31 - 2 - 2)
    assert PACE.begins(22.0, 1.0, np.array([10.0]), work) == pytest.approx(35 - 2 - 2), "without it, the start is late"


def paced(arrivals, expected, work, pace=PACE, gpus=2):
    free = np.zeros(gpus)
    return run_paced(
        np.array(arrivals), np.array(expected), np.array(work), free, gpus, pace, update_seconds=0.5
    )  # fmt: skip


def test_a_forecast_that_is_right_costs_what_one_beginning_costs() -> None:
    arrivals, work = [1.0, 2.0, 30.0], [4.0, 4.0, 4.0]
    run = paced(arrivals, arrivals, work, LearnerPace(2.0, 40.0))
    assert run.end == pytest.approx(30 + 2 + 0.5, abs=0.3)
    # 12 GPU-seconds of work, two starts of 2 s, the update.
    assert run.gpu_seconds == pytest.approx(12 + 4 + 1, abs=1.0)


def test_a_tail_that_comes_late_is_not_waited_for() -> None:
    """Forecast to end at 10 s, the last group comes at 500 s: holding both GPUs would cost 1,000 GPU-seconds."""
    run = paced([1.0, 2.0, 500.0], [1.0, 2.0, 10.0], [10.0, 10.0, 2.0])
    assert run.gpu_seconds < 60
    assert run.end == pytest.approx(500 + 2 + 1 + 0.5, abs=0.5)


@given(
    st.lists(st.tuples(st.floats(0, 60), st.floats(0, 60), st.floats(0.1, 4)), min_size=1, max_size=10),
    st.integers(1, 4),
    st.floats(0, 5),
    st.floats(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_whatever_comes_when_all_work_is_done_and_paid(groups, gpus, start, switch) -> None:
    arrivals, expected, work = (np.array(column) for column in zip(*groups, strict=True))
    run = paced(arrivals, expected, work, LearnerPace(start, switch), gpus)
    least = run_trainer(arrivals, work, np.zeros(gpus), TrainerPlan(gpus, 0.0), start_seconds=0.0, update_seconds=0.5)
    latest = arrivals.max() + start + work.sum() / gpus + 0.5
    assert least.end - 1e-6 <= run.end <= latest + 0.25 + 1e-6
    assert run.gpu_seconds >= work.sum() + 0.5 - 1e-6
