"""Moves in the generation stage: samples are gathered on other actors, and nothing is lost or generated twice."""

import asyncio
import random
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field

import pytest

from rlhfless_functions.api import (
    Done,
    Event,
    FinishedSample,
    GenerationRequest,
    Partial,
    Progress,
    Samples,
    Started,
)
from rlhfless_operator.planner.moves.migration import Actor, Move
from tests.training.generating import RandomMoves, UnreliablePlatform, run_stage, shares_of
from tests.training.generating import every_look_is_quick as every_look_is_quick

pytestmark = pytest.mark.usefixtures("every_look_is_quick")


@dataclass
class GatherAtOnce:
    """Gathers everything on the actor that spoke first, once each actor has finished a sample."""

    done: bool = False

    def due(self, actors: Collection[Actor], now: float) -> bool:
        return True

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        if self.done or len(actors) < 2 or any(actor.finished == 0 for actor in actors):
            return []
        self.done = True
        return [Move(actor.name, tuple(actor.samples), actors[0].name) for actor in actors[1:]]


async def test_gathering_is_one_new_request_with_the_union_and_frees_the_others() -> None:
    platform = UnreliablePlatform(random.Random(0))
    groups, outcome, held = await run_stage(platform, shares_of(6, 4, 3), GatherAtOnce())
    assert sorted(group.prompt for group in groups) == list(range(6))
    assert len(platform.generated) == 24, "nothing is generated twice"
    assert len(platform.sinks) == 4, "three actors, and one request for what they had left"
    assert held == [1, 0]
    assert outcome.moved > 0 and outcome.cuts == 3
    assert len(outcome.pauses) == 1


async def test_a_request_resumes_only_from_where_its_samples_have_been() -> None:
    resumed: dict[str, list[str]] = {}

    class Recording(UnreliablePlatform):
        def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
            resumed[request.sink] = list(request.resume_from)
            return super().run(request)

    await run_stage(Recording(random.Random(0)), shares_of(6, 4, 3), GatherAtOnce())
    *first, (_, gathered) = resumed.items()
    assert all(sinks == [] for _, sinks in first)
    assert sorted(gathered) == sorted(sink for sink, _ in first)


@dataclass
class MoveWhenHeard:
    """Moves an actor's samples to the other once both have said how far they are."""

    done: bool = False

    def due(self, actors: Collection[Actor], now: float) -> bool:
        return True

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        if self.done or len(actors) < 2 or not all(s.tokens for actor in actors for s in actor.samples.values()):
            return []
        self.done = True
        return [Move(actors[0].name, tuple(actors[0].samples), actors[1].name)]


@dataclass
class FlushingPlatform:
    """Finishes the first sample of a share, flushes the others, says how far it is, and then waits to be cut."""

    requests: list[GenerationRequest] = field(default_factory=list)

    async def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        first, *others = (
            FinishedSample(prompt=each.prompt, index=each.index, tokens=7, finish_reason="cut")
            for each in request.samples
        )
        yield Started(instance="i")
        if request.resume_from:
            # A read of what others had published, in which nothing is generated.
            await asyncio.sleep(0.1)
            yield Progress(finished=0, running=0, waiting=len(request.samples), tokens=0)
            for number, each in enumerate([first, *others]):
                yield Samples(samples=[each], part=f"{request.sink}/{number}.parquet")
            yield Done(result={})
            return
        yield Progress(finished=0, running=0, waiting=len(request.samples), tokens=0)
        yield Partial(samples=[first, *others], part=f"{request.sink}/0.parquet")
        yield Partial(samples=others, part=f"{request.sink}/1.parquet")
        yield Samples(samples=[first], part=f"{request.sink}/1.parquet")
        yield Samples(samples=[], part=f"{request.sink}/2.parquet")
        lengths = [(each.prompt, each.index, 9) for each in others]
        while True:
            yield Progress(finished=1, running=2, waiting=0, tokens=14, lengths=lengths)
            await asyncio.sleep(0.01)


async def test_who_goes_on_reads_what_has_not_been_heard_of_and_the_newest_snapshot() -> None:
    platform = FlushingPlatform()
    await run_stage(platform, shares_of(3, 2, 2), MoveWhenHeard())
    *first, gathered = platform.requests
    assert [request.resume_from for request in first] == [[], []]
    sinks = {request.sink for request in first}
    assert set(gathered.resume_from) == sinks | {f"{sink}/1.parquet" for sink in sinks}
    assert gathered.known_until == {sink: f"{sink}/2.parquet" for sink in sinks}
    assert len(gathered.samples) == 4


async def test_no_actor_is_cut_again_before_it_goes_on() -> None:
    early = 0

    class Watching(UnreliablePlatform):
        async def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
            nonlocal early
            went_on = False
            try:
                async for event in super().run(request):
                    went_on = went_on or isinstance(event, Samples | Done)
                    yield event
            finally:
                early += bool(request.resume_from) and not went_on

    for seed in range(20):
        chance = random.Random(seed)
        _, outcome, _ = await run_stage(Watching(chance), shares_of(6, 4, 4), RandomMoves(chance, 1.0))
        assert outcome.cuts > 0
    assert early == 0


async def test_a_pause_lasts_until_something_is_generated_again() -> None:
    platform = FlushingPlatform()
    _, outcome, _ = await run_stage(platform, shares_of(3, 2, 2), MoveWhenHeard())
    (pause,) = outcome.pauses
    assert pause >= 0.1
    # What it had been given is not its work either.
    *_, gathered = outcome.stretches
    assert set(gathered.begun.values()) == {9}
