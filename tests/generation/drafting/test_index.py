"""The index finds what followed the longest match of the newest tokens."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.data.draft_history import KnownResponse
from rlhfless_functions.generation.drafting.index import MATCH, SEPARATOR, DraftIndex


def grow(index: DraftIndex, row: int, tokens: list[int]) -> np.ndarray:
    """Write a sequence that is being generated; returns where its next token goes."""
    start = int(index.starts[row])
    index.tokens[start : start + len(tokens) + 1] = [*tokens, SEPARATOR]
    return np.array([start + len(tokens)])


def test_a_response_that_begins_like_a_known_one_of_the_prompt_is_expected_to_go_on_like_it() -> None:
    index = DraftIndex(1000, rows=1, row_tokens=100)
    index.add([KnownResponse(7, [90, 91, 92, 93], [10, 11, 12, 13, 14, 15, 1])])
    places, lengths = index.look_up(grow(index, 0, [90, 91, 92, 93, 10, 11]), np.array([7]))
    assert index.tokens[places[0] : places[0] + 5].tolist() == [12, 13, 14, 15, 1]
    assert lengths.tolist() == [6]


def test_a_match_never_leaves_its_sequence() -> None:
    index = DraftIndex(1000, rows=1, row_tokens=100)
    index.add([KnownResponse(0, [], [5, 6, 7, 8]), KnownResponse(0, [], [9, 10, 11, 12])])
    # The end of one and the beginning of the next are no sequence.
    _, lengths = index.look_up(grow(index, 0, [6, 7, 8, 9, 10, 11]), np.array([0]))
    assert lengths.tolist() == [3]


def test_the_prompts_own_response_is_expected_before_another_prompts() -> None:
    index = DraftIndex(1000, rows=1, row_tokens=100)
    index.add([KnownResponse(1, [], [5, 6, 7, 8, 50]), KnownResponse(2, [], [5, 6, 7, 8, 60])])
    for prompt, expected in ((1, 50), (2, 60)):
        places, _ = index.look_up(grow(index, 0, [5, 6, 7, 8]), np.array([prompt]))
        assert index.tokens[places[0]] == expected
    # A prompt without a response of its own takes what there is.
    places, _ = index.look_up(grow(index, 0, [5, 6, 7, 8]), np.array([3]))
    assert index.tokens[places[0]] in (50, 60)


def test_nothing_known_is_no_match() -> None:
    index = DraftIndex(1000, rows=2, row_tokens=100)
    ends = np.concatenate([grow(index, 0, [3, 4, 5, 6]), grow(index, 1, [7])])
    assert index.look_up(ends, np.array([0, 0]))[1].tolist() == [0, 0]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_match_is_what_it_says_however_little_room_there_is(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 4), min_size=1, max_size=40)
    index = DraftIndex(data.draw(st.integers(1, 300)), rows=1, row_tokens=60)
    for prompt, response in data.draw(st.lists(st.tuples(st.integers(0, 2), tokens), max_size=12)):
        index.add([KnownResponse(prompt, [1, 2], response)])
    sequence = data.draw(tokens)
    (place,), (length,) = index.look_up(grow(index, 0, sequence), np.array([data.draw(st.integers(0, 2))]))
    assert 0 <= length <= min(MATCH, len(sequence))
    if length:
        assert index.tokens[place - length : place].tolist() == sequence[-length:]
        assert index.tokens[place] != SEPARATOR


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_sequence_alone_finds_what_it_finds_among_others(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)
    index = DraftIndex(data.draw(st.integers(1, 600)), rows=8, row_tokens=60)
    for prompt, response in data.draw(st.lists(st.tuples(st.integers(0, 2), tokens), max_size=12)):
        index.add([KnownResponse(prompt, [1, 2], response)])
    ends = np.concatenate([grow(index, row, data.draw(tokens)) for row in range(8)])
    prompts = np.array(data.draw(st.lists(st.integers(0, 2), min_size=8, max_size=8)))
    together = index.look_up(ends, prompts)
    alone = [index.look_up(ends[row : row + 1], prompts[row : row + 1]) for row in range(8)]
    assert together[1].tolist() == [int(length[0]) for _, length in alone]
    found = together[1] > 0
    assert together[0][found].tolist() == np.array([int(place[0]) for place, _ in alone])[found].tolist()


@settings(max_examples=30, deadline=None)
@given(responses=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=10))
def test_responses_are_found_alike_whether_they_grew_here_or_came_whole(responses: list[list[int]]) -> None:
    whole, grown = (DraftIndex(1000, rows=1, row_tokens=60) for _ in range(2))
    whole.add([KnownResponse(0, [8, 9], response) for response in responses])
    grown.tokens[:] = whole.tokens
    place = MATCH
    for response in responses:
        for position in range(2, 2 + len(response)):
            grown.enter(np.array([place + position]), np.array([0]))
        place += len(response) + 3
    assert np.array_equal(whole._tables, grown._tables)
