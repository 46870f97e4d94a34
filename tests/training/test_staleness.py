"""How far generation may be ahead: whatever happens when, no step learns from weights that are too old."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.training.staleness import last_step_begun, oldest_version, staleness


@given(
    most=st.integers(1, 8),
    # Each event: the generator begins its next step if it may, or the learner finishes its next one if it can.
    events=st.lists(st.sampled_from(["generate", "learn"]), max_size=60),
)
def test_admission_bounds_staleness_whatever_the_order_of_events(most: int, events: list[str]) -> None:
    done, begun, sampled_with = 0, 0, {}
    for event in events:
        if event == "generate" and done >= oldest_version(begun + 1, most):
            begun += 1
            sampled_with[begun] = done
        elif event == "learn" and begun > done:
            done += 1
            assert 0 <= staleness(done, sampled_with[done]) <= most
        assert begun <= last_step_begun(done, most)


@given(done=st.integers(0, 50), most=st.integers(0, 8))
def test_the_last_step_that_may_begin_is_that_whose_oldest_weights_are_there(done: int, most: int) -> None:
    last = last_step_begun(done, most)
    assert oldest_version(last, most) <= done < oldest_version(last + 1, most)


def test_a_job_whose_steps_wait_for_each_other_is_never_stale() -> None:
    assert [staleness(step, step - 1) for step in (1, 2, 9)] == [0, 0, 0]
    assert oldest_version(5, 0) == 4
