"""How far generation may be ahead: whatever happens when, no step learns from weights that are too old."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.groups.staleness import last_step_begun, oldest_version, staleness, steps_ahead


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


def seconds_and_staleness(ahead: int, rollout: float, learning: float, steps: int = 40) -> tuple[float, float]:
    """What a job takes whose rollouts are made one by one, and its mean staleness."""
    generated, learnt, stale = [0.0], [0.0], []
    for step in range(1, steps + 1):
        begins = max(generated[-1], learnt[oldest_version(step, ahead)])
        stale.append(staleness(step, max(version for version in range(step) if learnt[version] <= begins)))
        generated.append(begins + rollout)
        learnt.append(max(learnt[-1], generated[-1]) + learning)
    return learnt[-1], sum(stale) / len(stale)


@given(most=st.integers(1, 8), rollout=st.floats(0.1, 10.0), learning=st.floats(0.1, 10.0))
def test_generation_is_no_further_ahead_than_the_learner_needs(most: int, rollout: float, learning: float) -> None:
    ahead = steps_ahead(most, rollout, learning)
    assert 1 <= ahead <= most
    seconds, stale = seconds_and_staleness(ahead, rollout, learning)
    at_most, staler = seconds_and_staleness(most, rollout, learning)
    assert seconds <= at_most + 1e-6, "the learner waits no longer"
    assert stale <= staler + 1e-9


def test_generation_goes_as_far_ahead_as_it_may_until_its_speed_is_known() -> None:
    assert steps_ahead(4, 0.0, 3.0) == steps_ahead(4, 3.0, 0.0) == 4
    assert [steps_ahead(4, seconds, 3.0) for seconds in (1.0, 3.0, 5.0, 60.0)] == [1, 2, 3, 4]
