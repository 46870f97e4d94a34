"""What drafts would bring: their cycles are counted as decoding would go through them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.generation.early_exit.draft_speed import Cycles, PassTimes, best_drafts, count_cycles
from rlhfless_functions.generation.early_exit.readouts import Readouts

RIGHT = st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=5)


def decoded(responses: list[list[bool]], drafts: int, longest: int) -> Cycles:
    """One response after the other, a token at a time."""
    count = drafted = 0
    for right in responses:
        at = 0
        while at < len(right):
            tried = min(drafts, longest - at - 1)
            kept = 0
            while kept < tried and at + kept < len(right) and right[at + kept]:
                kept += 1
            at += kept + 1
            count += 1
            drafted += tried
    return Cycles(count, drafted)


@given(RIGHT, st.integers(1, 15))
def test_cycles_are_those_of_decoding(responses: list[list[bool]], drafts: int) -> None:
    flat = np.array([each for right in responses for each in right])
    found = count_cycles(flat, [len(right) for right in responses], drafts, 20)
    assert found == decoded(responses, drafts, 20)


def readouts(drawn: list[list[int]], likeliest: list[list[int]]) -> Readouts:
    arrays = np.array(drawn, dtype=bool), np.array(likeliest, dtype=bool)
    numbers = np.ones(arrays[0].shape, np.float32)
    return Readouts(*arrays, arrays[0], numbers, numbers, [arrays[0].shape[1]])


def test_right_drafts_pay_by_what_they_cost() -> None:
    # Layer 1 is never right, layer 2 always is, if its likeliest token is taken.
    tokens = 64
    never, always = [0] * tokens, [1] * tokens
    read = readouts([never, never, always], [never, always, always])
    times = PassTimes(drafts={1: 1.0, 2: 2.0}, passes={1: 10.0, 16: 10.0})
    first, second = best_drafts(read, times, 1000)
    assert (first.layer, first.drafts, first.tokens_per_pass) == (1, 1, 1.0)
    assert first.speed == pytest.approx(10 / 11)
    assert (second.layer, second.drafts, second.choice, second.tokens_per_pass) == (2, 15, "likeliest", 16.0)
    assert second.speed == pytest.approx(16 * 10 / (15 * 2 + 10))


def test_times_in_between_are_between() -> None:
    times = PassTimes(drafts={1: 1.0, 3: 2.0}, passes={1: 4.0, 16: 7.0})
    assert times.draft(2) == 1.5
    assert times.verify(6) == 5.0
