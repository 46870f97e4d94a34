"""What a step takes in the long run: beside its bound, and what staleness and instances change."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.step.least_period import least_period
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, Share, plan
from rlhfless_operator.simulator.asynchronous.long_run import LongRun, long_run
from tests.simulator.small_scenario import PROFILE

SECONDS = st.floats(0.5, 60)
LENGTHS = st.lists(st.lists(st.integers(1, 2000), min_size=2, max_size=2), min_size=1, max_size=8)


def divided(lengths: list[list[int]], actors: int) -> tuple[Share, ...]:
    samples = [
        SampleLoad(prompt, index, 50, float(tokens))
        for prompt, group in enumerate(lengths)
        for index, tokens in enumerate(group)
    ]
    count = min(actors, len(lengths))
    return plan("even", samples, PROFILE.latency, Limits(count, count), weight_load_seconds=2.0).shares


def took(
    shares: tuple[Share, ...],
    learning: float,
    most: int,
    *,
    publishing: float = 0.0,
    preparation: float = 0.0,
    in_pieces: bool = False,
) -> LongRun:
    times = {"learning": learning, "publishing": publishing, "preparation": preparation}
    return long_run(shares, PROFILE, 256, most, **times, preparers=1, in_pieces=in_pieces)


@given(LENGTHS, st.integers(1, 4), SECONDS)
@settings(max_examples=30, deadline=None)
def test_a_synchronous_step_takes_its_longest_share_and_learning(
    lengths: list[list[int]], actors: int, learning: float
) -> None:
    shares = divided(lengths, actors)
    found = took(shares, learning, 0)
    assert found.seconds == pytest.approx(max(share.expected_seconds for share in shares) + learning)
    assert found.staleness == 0


@given(LENGTHS, st.integers(1, 4), SECONDS)
@settings(max_examples=30, deadline=None)
def test_a_synchronous_learner_that_begins_with_the_first_groups_ends_no_later(
    lengths: list[list[int]], actors: int, learning: float
) -> None:
    shares = divided(lengths, actors)
    whole, pieces = (took(shares, learning, 0, in_pieces=each) for each in (False, True))
    longest = max(share.expected_seconds for share in shares)
    tokens = [sum(each.prompt_tokens + each.expected_tokens for each in share.samples) for share in shares]
    assert max(longest, learning) - 1e-6 <= pieces.seconds <= whole.seconds + 1e-6
    assert pieces.staleness == 0
    if len(lengths) > 1 and len(tokens) > 1:
        assert pieces.seconds < whole.seconds or len(set(tokens)) == 1 or learning < 1


@given(LENGTHS, st.integers(1, 4), SECONDS, st.integers(0, 3), st.floats(0, 40))
@settings(max_examples=60, deadline=None)
def test_no_step_takes_less_than_the_bound(
    lengths: list[list[int]], actors: int, learning: float, most: int, preparation: float
) -> None:
    shares = divided(lengths, actors)
    found = took(shares, learning, most, preparation=preparation)
    # An instance that goes on with the same weights does not load them again.
    work = [share.expected_seconds - 2.0 for share in shares]
    least = least_period(work, learning, most, preparation=preparation)
    # Over a part of the steps, what was begun before it may be missing from it: the bound is one of long runs.
    slack = (sum(work) + learning + preparation) * (most + 1) / 12
    assert found.seconds >= least - slack - 1e-6
    assert 0 <= found.staleness <= most
    assert 0 < found.generation_busy <= 1 + 1e-9
    assert 0 < found.learning_busy <= 1 + 1e-9


def test_a_learner_that_publishes_beside_the_next_step_takes_more_of_them() -> None:
    shares = divided([[100, 100]], 1)
    # The learner sets the pace: it takes 20 s, or the 15 s before the weights are on their way.
    assert took(shares, 20.0, 2).seconds == pytest.approx(20.0)
    assert took(shares, 20.0, 2, publishing=5.0).seconds == pytest.approx(15.0)


def test_steps_wait_for_a_response_that_takes_long_once_in_as_many_steps_as_may_be_ahead() -> None:
    # Learning is much quicker than the longest response.
    shares = divided([[50, 50]] * 7 + [[50, 2000]], 8)
    alone, one, two = (took(shares, 1.0, most).seconds for most in (0, 1, 2))
    assert one == pytest.approx(alone / 2, rel=0.1)
    assert two == pytest.approx(alone / 3, rel=0.1)
