"""Groups that arrive while a rollout goes on, with actors of its own or with the live actors of its job."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.api import AddSamples, Event, SampleTask
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.training.actors.generated import grouped
from rlhfless_operator.training.actors.live_rollout import LiveRollout
from rlhfless_operator.training.requests.tasks import StageFailedError
from tests.training.generating import RandomMoves, UnreliablePlatform, Waiting, run_stage, shares_of
from tests.training.generating import every_look_is_quick as every_look_is_quick
from tests.training.stages.test_live_actors import LivePlatform, actors_on, generate, rollout_of

pytestmark = pytest.mark.usefixtures("every_look_is_quick")


async def arriving(pauses: list[int], groups: list[int], actors: int) -> AsyncIterator[list[list[SampleTask]]]:
    """So many groups each time, after so many moments."""
    first = 5
    for pause, count in zip(pauses, groups, strict=False):
        for _ in range(pause):
            await asyncio.sleep(0)
        yield shares_of(count, 4, min(actors, count), first)
        first += count


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    actors=st.integers(1, 4),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    drain=st.sampled_from([0.0, 0.2]),
    moves=st.sampled_from([0.0, 0.2]),
    wait=st.sampled_from([0.0, 0.3]),
    pauses=st.lists(st.sampled_from([0, 1, 5, 30, 200]), max_size=4),
    groups=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
async def test_groups_that_arrive_come_out_once_and_whole(
    seed: int,
    actors: int,
    loss: float,
    drain: float,
    moves: float,
    wait: float,
    pauses: list[int],
    groups: list[int],
) -> None:
    chance = random.Random(seed)
    platform = UnreliablePlatform(chance, loss=loss, drain=drain, wait=wait)
    arrivals = arriving(pauses, groups, actors)
    away = Waiting() if wait else None
    found, outcome, held = await run_stage(
        platform, shares_of(5, 4, actors), RandomMoves(chance, moves), arrivals=arrivals, away=away
    )
    expected = 5 + sum(groups[: len(pauses)])
    assert sorted(group.prompt for group in found) == list(range(expected))
    assert all([sample.index for sample in group.samples] == [0, 1, 2, 3] for group in found)
    assert len(platform.generated) == len(outcome.lengths) == 4 * expected, "none is generated twice"
    assert held[-1] == 0, "every instance is released in the end"
    assert platform.most_running <= max([actors, *held]), "no more instances are asked than are held"
    assert moves or platform.most_running <= actors, "nor more than the step has"
    assert not platform.held


async def test_they_join_the_smallest_batch_that_runs() -> None:
    platform = UnreliablePlatform(random.Random(0))
    shares = [shares_of(4, 4, 1)[0], shares_of(1, 4, 1, first=4)[0]]
    found, _, held = await run_stage(platform, shares, arrivals=arriving([2], [1], 2))
    assert len(found) == 6
    (line,) = platform.lines
    assert isinstance(line, AddSamples)
    assert line.sink.split("/")[-1].startswith("actor-0001"), "the one with four samples"
    assert {sample.prompt for sample in line.samples} == {5}
    assert held == [1, 0], "no other instance was asked for"


async def test_where_all_actors_have_ended_the_plan_of_the_new_groups_says_how_many_begin() -> None:
    platform = UnreliablePlatform(random.Random(0))
    found, _, held = await run_stage(platform, shares_of(5, 4, 3), arrivals=arriving([300, 300], [2, 1], 3))
    assert len(found) == 8
    assert platform.lines == []
    assert held == [2, 1, 0, 2, 1, 0, 1, 0]


async def test_a_request_has_room_for_a_whole_batch_and_the_longest_prompt() -> None:
    class Noted(UnreliablePlatform):
        def run(self, request: LiveRequest) -> AsyncGenerator[Event, None]:
            assert request.live is not None
            batches.append((request.live.sequences, request.live.prompt_tokens))
            return super().run(request)

    batches: list[tuple[int, int]] = []
    arrivals = arriving([300], [1], 1)
    await run_stage(Noted(random.Random(0)), shares_of(5, 4, 1), arrivals=arrivals, longest_prompt=99)
    assert batches == [(20, 99), (20, 99)], "more may arrive"


async def test_a_failure_ends_it_though_more_could_arrive() -> None:
    async def never() -> AsyncIterator[list[list[SampleTask]]]:
        await asyncio.Event().wait()
        yield []

    platform = UnreliablePlatform(random.Random(0), loss=1.0)
    with pytest.raises(StageFailedError):
        await run_stage(platform, shares_of(5, 4, 1), arrivals=never(), retries=0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    actors=st.integers(1, 3),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    drain=st.sampled_from([0.0, 0.2]),
    pauses=st.lists(st.sampled_from([0, 1, 5, 30, 200]), max_size=4),
    groups=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
async def test_live_actors_take_in_what_arrives(
    seed: int, actors: int, loss: float, drain: float, pauses: list[int], groups: list[int]
) -> None:
    platform = LivePlatform(random.Random(seed), loss=loss, drain=drain)
    live = actors_on(platform)
    given = rollout_of(1, 5)
    rollout = LiveRollout([*given.waiting], given.outcome, given.settings, grows=True)

    async def take_in() -> None:
        async for shares in arriving(pauses, groups, 1):
            rollout.add(grouped(shares))
            live.assign()
        rollout.is_whole()

    arrival = asyncio.create_task(take_in())
    found = await asyncio.wait_for(generate(live, rollout, actors), 60)
    expected = 5 + sum(groups[: len(pauses)])
    assert sorted(group.prompt for group in found) == list(range(expected))
    assert len(platform.generated) == len(set(platform.generated)) == 4 * expected, "none is generated twice"
    assert platform.most_running <= actors
    assert arrival.done()
    await live.close()
