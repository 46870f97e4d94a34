"""Environments of a rehearsal: as many turns, tokens and seconds as a trace has."""

import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.data.traces import TraceLengths, TraceRows
from rlhfless_functions.data.turns import TracedResponse, turns_of
from rlhfless_functions.environments.emulated import EmulatedEpisodes
from rlhfless_functions.environments.episodes import Observation, Turn

RESPONSES = st.builds(TracedResponse, st.integers(0, 300), st.integers(0, 40), st.integers(0, 500), st.floats(0, 100))


@given(RESPONSES)
def test_turns_divide_a_response_without_a_rest(response: TracedResponse) -> None:
    spans = turns_of(response)
    lengths = [end - start for start, end in spans]
    assert len(spans) == max(1, min(response.turns, response.sampled))
    assert sum(lengths) == response.sampled
    assert max(lengths) - min(lengths) <= 1
    assert spans[-1][1] == response.sampled + response.given, "all that is given comes before the last turn"
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def episodes(response: TracedResponse, clock: Clock, scale: float = 1.0) -> EmulatedEpisodes:
    column = np.array([0])
    rows = TraceRows(
        *(column, column, column, np.array([9]), np.array([response.sampled])),
        turns=np.array([response.turns]),
        given_tokens=np.array([response.given]),
        away_milliseconds=np.array([round(1000 * response.away_seconds)]),
    )
    return EmulatedEpisodes(TraceLengths(rows, 1), scale, clock)


def turn(response: int, room: int = 1000) -> Turn:
    return Turn((0, 0), {}, [5] * response, [], seed=1, truncated=room <= 0, room=room, step=1)


def answer(played: EmulatedEpisodes, clock: Clock, asked: Turn) -> tuple[Observation, float]:
    """The answer to a turn, and the seconds that it takes."""
    played.submit(asked)
    begun = clock.now
    while not (found := played.ready(0.0)):
        clock.now += 0.5
    return found[0], clock.now - begun


def test_an_episode_has_the_turns_the_tokens_and_the_time_of_its_trace() -> None:
    clock = Clock()
    played = episodes(TracedResponse(sampled=30, turns=3, given=10, away_seconds=8.0), clock)
    at, waits = 0, []
    for given_tokens in (0, 5, 5):
        found, seconds = answer(played, clock, turn(at))
        assert (len(found.tokens), found.done) == (given_tokens, False)
        waits.append(seconds)
        at += given_tokens + 10
    found, seconds = answer(played, clock, turn(at))
    assert found.done and found.outcome is not None
    assert (found.outcome.turns, found.outcome.ended, found.outcome.seconds_away) == (3, "finished", 8.0)
    assert [*waits, seconds] == [2.0] * 4, "the beginning and three turns"


def test_a_faster_rehearsal_waits_for_less_time() -> None:
    clock = Clock()
    played = episodes(TracedResponse(sampled=30, turns=1, given=0, away_seconds=8.0), clock, scale=0.25)
    found, seconds = answer(played, clock, turn(30))
    assert seconds == 1.0
    assert found.outcome is not None and found.outcome.seconds_away == 2.0


def test_an_episode_that_has_no_room_ends_as_a_real_one_does() -> None:
    clock = Clock()
    played = episodes(TracedResponse(sampled=30, turns=3, given=10), clock)
    found, _ = answer(played, clock, turn(10, room=5))
    assert found.done and found.outcome is not None
    assert (found.outcome.ended, found.outcome.turns) == ("maxTokens", 1)


def test_answers_come_in_the_order_in_which_they_are_due_and_wake_who_waits() -> None:
    played = episodes(TracedResponse(sampled=3, turns=1, given=0, away_seconds=0.1), Clock())
    played._clock = time.monotonic
    threading.Timer(0.05, played.submit, [turn(3)]).start()
    (found,) = played.ready(30.0)
    assert found.done
    assert played.ready(0.0) == []


def test_a_turn_that_another_actor_hands_over_again_gets_the_same_answer() -> None:
    clock = Clock()
    played = episodes(TracedResponse(sampled=30, turns=3, given=10), clock)
    first, _ = answer(played, clock, turn(10))
    played.forget((0, 0))
    second, _ = answer(played, clock, turn(10))
    assert first == second == Observation((0, 0), [2] * 5)


@pytest.mark.parametrize("at", [0, 15])
def test_an_answer_of_nothing_lets_the_sample_go_on(at: int) -> None:
    clock = Clock()
    played = episodes(TracedResponse(sampled=30, turns=2, given=0), clock)
    found, _ = answer(played, clock, turn(at))
    assert not found.done and list(found.tokens) == []
