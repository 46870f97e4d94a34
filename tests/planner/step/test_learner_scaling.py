"""How many instances learn together: what was measured, what is forecast, and what a trial may cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.step.learner_scaling import (
    MOST_LOSS,
    MOST_STEPS_UNTIL_KNOWN,
    LearnerOption,
    Measured,
    neighbours,
    options,
    sizes,
    to_judge_by,
    worth_trying,
)

SECONDS = st.floats(1e-6, 1e3)


def measured(seconds: dict[int, float], steps: int = 2) -> dict[int, Measured]:
    return {size: Measured([each] * steps, [0.5] * steps) for size, each in seconds.items()}


def offered(seconds: dict[int, float], now: int, most: int = 8) -> dict[int, LearnerOption]:
    found = options(measured(seconds), sizes(1, most), now, change_seconds=0.0, idle_seconds=1.0)
    return {each.instances: each for each in found}


def test_the_numbers_that_come_into_question_are_halves_of_the_most() -> None:
    assert sizes(1, 8) == [1, 2, 4, 8]
    assert sizes(3, 10) == [3, 5, 10]
    assert sizes(2, 2) == [2]
    assert neighbours(4, sizes(1, 8)) == [2, 8]
    assert neighbours(1, sizes(1, 8)) == [2]


def test_one_measured_number_is_no_forecast_of_others() -> None:
    assert list(offered({8: 1.0}, 8)) == [8]
    assert options(measured({8: 1.0}, steps=1), [4, 8], 8, change_seconds=0.0, idle_seconds=0.0) == []


def test_two_measured_numbers_forecast_their_neighbours_by_what_is_divided_and_what_is_not() -> None:
    found = offered({8: 2.0, 4: 3.0}, 8)
    assert list(found) == [2, 4, 8]
    assert (found[2].token_seconds, found[2].measured) == (pytest.approx(5.0), False)
    assert (found[4].token_seconds, found[4].measured) == (3.0, True)


def test_a_learners_first_step_is_judged_by_only_where_there_are_no_others() -> None:
    first, later = Measured([5.0] * 9, [0.5] * 9), Measured([1.0] * 2, [0.1] * 2)
    one, none = Measured([1.0], [0.1]), Measured([], [])
    assert to_judge_by(later, first) is later
    assert to_judge_by(one, first) is first, "learners are started anew for nearly every step"
    assert not to_judge_by(one, one).known
    assert not to_judge_by(none, none).known


@given(st.lists(st.booleans(), min_size=MOST_STEPS_UNTIL_KNOWN, max_size=MOST_STEPS_UNTIL_KNOWN))
def test_after_so_many_steps_a_number_is_known_whichever_began_with_a_fresh_learner(fresh: list[bool]) -> None:
    first, later = Measured([1.0] * sum(fresh), []), Measured([1.0] * (len(fresh) - sum(fresh)), [])
    assert to_judge_by(later, first).known


def test_an_outlier_does_not_decide() -> None:
    seconds = Measured([1.0, 1.0, 90.0], [0.0] * 3)
    (found,) = options({1: seconds}, [1], 1, change_seconds=0.0, idle_seconds=0.0)
    assert found.token_seconds == 1.0


def test_a_change_is_charged_to_all_numbers_but_the_present_one() -> None:
    found = options(measured({1: 1.0, 2: 1.0}), [1, 2], 2, change_seconds=3.0, idle_seconds=0.0)
    assert {each.instances: each.rest_seconds for each in found} == {1: 3.5, 2: 0.5}


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), SECONDS, min_size=2))
def test_forecasts_are_positive_and_never_better_than_linear_scaling_nor_worse_than_none(
    seconds: dict[int, float],
) -> None:
    found = offered(seconds, max(seconds), 16)
    for size, option in found.items():
        if option.measured:
            assert option.token_seconds == seconds[size]
            continue
        assert option.token_seconds > 0
        for smaller, larger in ((size, 2 * size), (size // 2, size)):
            pair = [found[each] for each in (smaller, larger) if each in found]
            if len(pair) == 2 and not any(each.measured for each in pair):
                assert pair[1].token_seconds <= pair[0].token_seconds * (1 + 1e-9)
                assert pair[0].token_seconds <= 2 * pair[1].token_seconds * (1 + 1e-9)


@given(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 20), st.integers(1, 500),
    st.floats(0.01, 1.0), st.floats(0, 1), st.floats(0.0, 1.0), SECONDS,
)  # fmt: skip
def test_a_trial_costs_at_most_its_bound_however_learning_scales(
    now: int, other: int, steps: int, left: int, share: float, cost_weight: float, serial: float, learning: float
) -> None:
    if now == other or not worth_trying(now, other, steps=steps, left=left, share=share, cost_weight=cost_weight):
        return
    # Learning of `learning` seconds in a step of `learning / share`, of which `serial` is not divided.
    step = learning / share
    then = learning * (serial + (1 - serial) * now / other)
    time = (step - learning + then) / step - 1
    cost = (other * then) / (now * learning) - 1
    loss = (1 - cost_weight) * max(0.0, time) + cost_weight * max(0.0, cost)
    assert steps * loss <= MOST_LOSS * left * (1 + 1e-6)
    assert steps <= left
