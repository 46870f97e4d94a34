"""Sizes of live batches: no sample waits while an actor may open."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.moves.live_batches import Batch, Give, WaitingGroup, deal
from rlhfless_operator.planner.moves.live_sizes import Batches


def test_actors_that_the_samples_need_have_places_for_all_of_them() -> None:
    batches = Batches(actors=12, places=400, samples=256)
    unfinished = {0: 128 * 16}
    assert batches.missing(unfinished, 0) == 8
    assert batches.room(unfinished, 8, 16, may_open=True) * 8 >= 128 * 16


@given(
    actors=st.integers(1, 12),
    places=st.integers(1, 64),
    samples=st.integers(1, 64),
    groups=st.integers(1, 64),
    size=st.integers(1, 16),
)
def test_no_sample_waits_while_an_actor_may_open(
    actors: int, places: int, samples: int, groups: int, size: int
) -> None:
    asked = Batches(actors, max(places, samples), samples)
    waiting, held, unfinished, left = groups, list[int](), {0: groups * size}, 0
    while waiting:
        opens = asked.missing(unfinished, len(held), left=left)
        assert opens or left == 0 or len(held) == actors
        held += [0] * opens
        room = asked.room(unfinished, len(held), size, may_open=len(held) < actors)
        found = deal(
            [Batch(0, each, asked.free(each, room)) for each in held],
            [WaitingGroup(0, size)] * waiting,
            may_open=len(held) < actors,
            gathers=False,
        )
        for command in found:
            assert isinstance(command, Give)
            held[command.batch] += size
        waiting -= len(found)
        left = waiting * size
        if left and len(held) == actors:
            assert all(asked.places < each <= max(asked.places, size) + size for each in held)
            return
    assert sum(held) == groups * size and len(held) <= actors


@given(st.integers(1, 12), st.integers(1, 64), st.integers(1, 2048), st.integers(1, 16))
def test_the_actors_that_are_needed_have_no_more_samples_than_expected(
    actors: int, samples: int, unfinished: int, group: int
) -> None:
    needed = Batches(actors, 64, samples).missing({0: unfinished}, 0)
    assert needed == min(actors, -(-unfinished // samples))


@given(
    actors=st.integers(1, 4),
    places=st.integers(1, 64),
    size=st.integers(1, 16),
    ends=st.lists(st.integers(0, 3), max_size=200),
)
def test_batches_stay_full_while_groups_wait_and_at_most_one_group_waits_in_an_instance(
    actors: int, places: int, size: int, ends: list[int]
) -> None:
    """Whole groups that waited for free places of their own left up to a group's places empty."""
    asked, held, waiting = Batches(actors, places, places), [0] * actors, 1000
    for end in [0, *ends]:
        while True:
            room = asked.room({0: waiting * size + sum(held)}, actors, size, may_open=False)
            found = deal(
                [Batch(0, each, asked.free(each, room)) for each in held],
                [WaitingGroup(0, size)] * waiting,
                may_open=False,
                gathers=False,
            )
            for command in found:
                assert isinstance(command, Give)
                held[command.batch] += size
                waiting -= 1
            if not found:
                break
        assert all(places < each <= max(places, size) + size for each in held)
        held[end % actors] -= 1


@given(places=st.integers(1, 64), busy=st.integers(0, 64), room=st.integers(0, 100))
def test_no_sample_waits_in_an_instance_that_does_not_answer(places: int, busy: int, room: int) -> None:
    asked = Batches(2, places, places)
    assert busy + asked.free(busy, room, answers=False) <= max(busy, places)
    assert asked.free(busy, room) >= asked.free(busy, room, answers=False)
