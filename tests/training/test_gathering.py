"""Moves in the generation stage: samples are gathered on other actors, and nothing is lost or generated twice."""

import asyncio
import random
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field

import pytest

from rlhfless_functions.api import (
    AddSamples,
    Done,
    Event,
    FinishedSample,
    GenerationResult,
    Leave,
    Partial,
    Progress,
    Samples,
    Started,
)
from rlhfless_operator.planner.moves.migration import Actor, Move
from rlhfless_operator.platforms.base import InstanceLostError
from rlhfless_operator.platforms.live_request import LiveRequest
from tests.training.generating import RandomMoves, UnreliablePlatform, Waiting, run_stage, shares_of
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


async def test_gathering_adds_to_a_batch_that_goes_on_and_frees_the_others() -> None:
    platform = UnreliablePlatform(random.Random(0))
    groups, outcome, held = await run_stage(platform, shares_of(6, 4, 3), GatherAtOnce(), slots=64)
    assert sorted(group.prompt for group in groups) == list(range(6))
    assert len(platform.generated) == 24, "nothing is generated twice"
    assert len(platform.sinks) == 3, "nobody needs another request"
    assert held == [2, 1, 0]
    assert outcome.moved > 0 and outcome.cuts == 2
    assert len(outcome.pauses) == 1


async def test_samples_that_join_resume_only_from_where_they_have_been() -> None:
    platform = UnreliablePlatform(random.Random(0))
    await run_stage(platform, shares_of(6, 4, 3), GatherAtOnce())
    left = {line.sink for line in platform.lines if isinstance(line, Leave)}
    joined = [line for line in platform.lines if isinstance(line, AddSamples)]
    assert sorted(sink for line in joined for sink in line.resume_from) == sorted(left)
    assert all(len(line.resume_from) == 1 for line in joined)


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
    """Finishes the first sample of a share, flushes the others, says how far it is, and waits for lines."""

    requests: list[LiveRequest] = field(default_factory=list)
    joined: list[AddSamples] = field(default_factory=list)
    has_joined: asyncio.Event = field(default_factory=asyncio.Event)
    loses: bool = False
    """Whether the instance that samples leave is lost before it has stored them."""

    async def run(self, request: LiveRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        sink, received = request.sink, len(request.samples)
        first, *others = (
            FinishedSample(prompt=each.prompt, index=each.index, tokens=7, finish_reason="cut")
            for each in request.samples
        )
        yield Started(instance="i")
        yield Progress(finished=0, running=0, waiting=len(request.samples), tokens=0)
        yield Partial(samples=[first, *others], part=f"{sink}/0.parquet", of=sink)
        yield Partial(samples=others, part=f"{sink}/1.parquet", of=sink)
        yield Samples(samples=[first], part=f"{sink}/1.parquet", of=sink)
        yield Samples(samples=[], part=f"{sink}/2.parquet", of=sink)
        await asyncio.sleep(0.01)
        lengths = [(each.prompt, each.index, 9) for each in others]
        yield Progress(finished=1, running=2, waiting=0, tokens=14, lengths=lengths, received=received)
        async for line in request.lines():
            if isinstance(line, AddSamples):
                self.joined.append(line)
                self.has_joined.set()
                # A read of what others had published.
                await asyncio.sleep(0.1)
                received += len(line.samples)
                lengths += [(each.prompt, each.index, 11) for each in line.samples]
                yield Progress(finished=1, running=4, waiting=0, tokens=18, lengths=lengths, received=received)
                for number, (prompt, index, tokens) in enumerate(lengths, 3):
                    sample = FinishedSample(prompt=prompt, index=index, tokens=tokens, finish_reason="stop")
                    yield Samples(samples=[sample], part=f"{sink}/{number}.parquet", of=sink)
            elif self.loses:
                raise InstanceLostError("killed")
            else:
                yield Done(result={}, of=sink)
                # Its samples are stored, so that the end of its request is not waited for.
                async with asyncio.timeout(60):
                    await self.has_joined.wait()
        yield Done(result={})


async def test_samples_that_join_are_read_from_what_has_not_been_heard_of_and_the_newest_snapshot() -> None:
    platform = FlushingPlatform()
    await run_stage(platform, shares_of(3, 2, 2), MoveWhenHeard())
    source, receiver = platform.requests
    assert source.resume_from == receiver.resume_from == []
    (line,) = platform.joined
    assert line.sink == receiver.sink
    assert set(line.resume_from) == {source.sink, f"{source.sink}/1.parquet"}
    assert line.known_until == {source.sink: f"{source.sink}/2.parquet"}
    assert len(line.samples) == 2


async def test_no_actor_is_emptied_before_it_has_taken_in_what_it_was_given() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        platform = UnreliablePlatform(chance)
        _, outcome, _ = await run_stage(platform, shares_of(6, 4, 4), RandomMoves(chance, 1.0))
        assert outcome.cuts > 0
        assert platform.together == 0


async def test_a_move_lasts_until_its_samples_are_in_the_batch() -> None:
    platform = FlushingPlatform()
    _, outcome, _ = await run_stage(platform, shares_of(3, 2, 2), MoveWhenHeard())
    (pause,) = outcome.pauses
    assert pause >= 0.1
    # What they had been given is not the receiver's work.
    *_, stretch = outcome.stretches
    moved = {(sample.prompt, sample.index) for sample in platform.joined[0].samples}
    assert {stretch.begun[key] for key in moved} == {9}


async def test_tokens_that_a_lost_source_had_not_stored_are_the_receivers_work() -> None:
    platform = FlushingPlatform(loses=True)
    _, outcome, _ = await run_stage(platform, shares_of(3, 2, 2), MoveWhenHeard())
    *_, stretch = outcome.stretches
    moved = {(sample.prompt, sample.index) for sample in platform.joined[0].samples}
    assert {stretch.begun[key] for key in moved} == {7}


@dataclass
class MoveAtOnce:
    """Moves the second actor's samples to the first when it is asked."""

    done: bool = False

    def due(self, actors: Collection[Actor], now: float) -> bool:
        return not self.done

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        if len(actors) < 2:
            return []
        self.done = True
        return [Move(actors[1].name, tuple(actors[1].samples), actors[0].name)]


@dataclass
class OneInstance(UnreliablePlatform):
    """A platform whose second request waits until the first has ended."""

    free: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, request: LiveRequest) -> AsyncGenerator[Event, None]:
        async with self.free:
            async for event in super().run(request):
                yield event


async def test_no_sample_is_taken_from_a_request_that_no_instance_has_begun() -> None:
    async with asyncio.timeout(60):
        groups, outcome, _ = await run_stage(OneInstance(random.Random(0)), shares_of(6, 4, 2), MoveAtOnce())
    assert len(groups) == 6
    assert outcome.cuts == 0


@dataclass
class WaitingReceiver(UnreliablePlatform):
    """An actor whose samples all wait for their environments ends while others are on their way to it."""

    has_sent: bool = True
    """Whether the source has stored its samples, so that they have been sent to the receiver."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, request: LiveRequest) -> AsyncGenerator[Event, None]:
        if request.key.attempt > 0:
            async for event in super().run(request):
                yield event
            return
        self.sinks[request.sink] = set()
        yield Started(instance="i")
        for _ in range(2):
            yield Progress(finished=0, running=1, waiting=0, tokens=0, received=len(request.samples))
            await asyncio.sleep(0.01)
        if request.key.part == "actor-0000":
            await (anext(request.lines()) if self.has_sent else self.left.wait())
            result = GenerationResult(
                finished=0, unfinished=4, parts=[], prompt_tokens=0, response_tokens=0, all_wait=True
            )
            yield Done(result=result.model_dump())
            self.ended.set()
            return
        await anext(request.lines())
        self.left.set()
        if not self.has_sent:
            await self.ended.wait()
            await asyncio.sleep(0.01)
        yield Done(result={}, of=request.sink)
        yield Done(result={})


class NeverAnswering(Waiting):
    """Environments of which nobody should wait for an answer."""

    async def come(self, samples: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("an actor was let go")


@pytest.mark.parametrize("has_sent", [True, False])
async def test_an_actor_to_which_samples_are_on_their_way_is_neither_let_go_nor_lost(has_sent: bool) -> None:
    platform = WaitingReceiver(random.Random(0), has_sent=has_sent)
    async with asyncio.timeout(60):
        groups, outcome, _ = await run_stage(
            platform, shares_of(4, 2, 2), MoveAtOnce(), away=NeverAnswering(), retries=0
        )
    assert len(groups) == 4
    assert outcome.moved == 4
    assert outcome.lost == 0
