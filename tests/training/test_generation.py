"""The generation stage: whatever happens to instances, every group comes out once and whole."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.api import (
    Done,
    Event,
    Failed,
    FinishedSample,
    GenerationRequest,
    GenerationResult,
    Partial,
    Progress,
    Samples,
    SampleTask,
    Started,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.settings import ModelSettings, SamplingSettings
from rlhfless_operator.planner.migration import Actor, Migration, Move
from rlhfless_operator.platforms.base import InstanceLostError, TaskFailedError
from rlhfless_operator.training import moves
from rlhfless_operator.training.generated import GenerationOutcome
from rlhfless_operator.training.generation import GenerationSettings, generate
from rlhfless_operator.training.requests import ActorAttempt
from rlhfless_operator.training.tasks import StageFailedError

Key = tuple[int, int]


@pytest.fixture(autouse=True, scope="module")
def every_look_is_quick() -> Iterator[None]:
    """On a busy machine a look at the rule takes long, and the next one would come after the end."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(moves, "_LOOK_SHARE", math.inf)
        yield


@dataclass
class UnreliablePlatform:
    """Generates samples, remembers what each sink holds, and loses instances as told."""

    chance: random.Random
    loss: float = 0.0
    drain: float = 0.0
    sinks: dict[str, set[Key]] = field(default_factory=dict)
    generated: list[Key] = field(default_factory=list)
    part_of: dict[Key, str] = field(default_factory=dict)
    held: set[Key] = field(default_factory=set)
    running: int = 0
    most_running: int = 0
    cut: int = 0
    failure: Failed | None = None

    async def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        assert request.sink not in self.sinks, "two requests write one sink"
        wanted = {(sample.prompt, sample.index) for sample in request.samples}
        assert not wanted & self.held, "two requests hold one sample"
        self.held |= wanted
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        mine = self.sinks[request.sink] = set()
        before = set().union(*(self.sinks[sink] for sink in request.resume_from))
        ended = False
        try:
            yield Started(instance="i")
            if self.failure is not None:
                raise TaskFailedError(self.failure)
            for number, sample in enumerate(request.samples):
                key = (sample.prompt, sample.index)
                # Time passes, as on a real stream: the others speak in between.
                await asyncio.sleep(0)
                if key not in before:
                    self.generated.append(key)
                mine.add(key)
                finished = FinishedSample(prompt=key[0], index=key[1], tokens=sum(key), finish_reason="stop")
                # What had been generated before is announced as what it was.
                part = self.part_of.setdefault(key, f"{request.sink}/{number}")
                yield Samples(samples=[finished], part=part)
                if self.chance.random() < self.loss:
                    ended = True
                    raise InstanceLostError("killed")
                if self.chance.random() < self.drain:
                    break
            ended = True
            result = GenerationResult(finished=0, unfinished=0, parts=[], prompt_tokens=0, response_tokens=0)
            yield Done(result=result.model_dump())
        finally:
            try:
                await asyncio.sleep(0)
            finally:
                self.held -= wanted
                self.running -= 1
                self.cut += not ended


@dataclass
class RandomMoves:
    """Gathers, splits and restarts actors at random."""

    chance: random.Random
    probability: float

    def due(self, actors: Collection[Actor], now: float) -> bool:
        return True

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        if self.chance.random() >= self.probability:
            return []
        names = [actor.name for actor in actors]
        source = self.chance.choice(actors)
        keys = list(source.samples)
        others: list[str | None] = [name for name in names if name != source.name]
        first, second = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        moves = [
            Move(source.name, tuple(part), self.chance.choice([None, *others])) for part in (first, second) if part
        ]
        return moves if self.chance.random() < 0.5 else [Move(source.name, tuple(keys), moves[0].destination)]


def make_request(attempt: ActorAttempt) -> GenerationRequest:
    return GenerationRequest(
        key=TaskKey(job_uid="u", step=3, stage="generation", part=attempt.actor, attempt=attempt.number),
        result=f"{attempt.sink}/result.json",
        model=ModelSettings(source="m"),
        weights=WeightsReference(version=2, uri="w"),
        prompts="p",
        samples=attempt.samples,
        sampling=SamplingSettings(),
        seed=0,
        sink=attempt.sink,
        resume_from=attempt.resume_from,
        known_until=attempt.known_until,
    )


def shares_of(groups: int, size: int, actors: int) -> list[list[SampleTask]]:
    samples = [SampleTask(prompt=prompt, index=index) for prompt in range(groups) for index in range(size)]
    return [samples[actor::actors] for actor in range(actors) if samples[actor::actors]]


def migration_of(rule: object, *, max_moves: int = 1000) -> Migration:
    return Migration(rule, lambda key, tokens: (10.0, 0.0), max_moves=max_moves)  # type: ignore[arg-type]


def settings_of(**changes: object) -> GenerationSettings:
    arguments = {
        "sink_root": "sinks",
        "driver": 1,
        "retries": 3,
        "prompt_tokens": lambda prompt: 5,
        "make_request": make_request,
        "look_seconds": 0.0,
        **changes,
    }
    return GenerationSettings(**arguments)  # type: ignore[arg-type]


async def run_stage(
    platform: UnreliablePlatform,
    shares: list[list[SampleTask]],
    rule: object = None,
    outcome: GenerationOutcome | None = None,
    **changes: object,
) -> tuple:
    outcome = outcome or GenerationOutcome(sinks=[])
    actors: list[int] = []

    async def hold(count: int) -> None:
        actors.append(count)

    groups = [
        group
        async for group in generate(
            platform,
            shares,
            outcome,
            settings_of(**changes),
            migration=migration_of(rule),
            on_event=lambda actor, event: None,
            on_actors=hold,
        )
    ]
    return groups, outcome, actors


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    actors=st.integers(1, 6),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    drain=st.sampled_from([0.0, 0.2]),
    moves=st.sampled_from([0.0, 0.1, 0.3]),
)
async def test_every_group_comes_out_once_and_whole(
    seed: int, actors: int, loss: float, drain: float, moves: float
) -> None:
    chance = random.Random(seed)
    platform = UnreliablePlatform(chance, loss=loss, drain=drain)
    rule = RandomMoves(chance, moves)
    groups, outcome, held = await run_stage(platform, shares_of(5, 4, actors), rule)
    assert sorted(group.prompt for group in groups) == list(range(5))
    for group in groups:
        assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
        assert group.lengths == [group.prompt + index for index in range(4)]
        assert group.parts == sorted({platform.part_of[group.prompt, index] for index in range(4)})
    assert len(platform.generated) == 20, "what is published is never generated again"
    assert held[-1] == 0, "every instance is released in the end"
    assert all(before != after for before, after in pairwise([actors, *held])), "told of changes alone"
    assert platform.most_running <= max([actors, *held]), "no more instances are asked than are held"
    assert outcome.cuts >= platform.cut
    assert not platform.held


async def test_a_failure_that_no_instance_can_mend_ends_the_stage_with_its_message() -> None:
    failure = Failed(reason="model_unloadable", message="the tokenizer has more entries", retryable=False)
    platform = UnreliablePlatform(random.Random(0), failure=failure)
    with pytest.raises(StageFailedError, match="the tokenizer has more entries"):
        await run_stage(platform, shares_of(2, 2, 2))


async def test_a_share_that_never_progresses_is_given_up_after_its_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failed(reason="out_of_memory", message="no room for one sequence", retryable=True)
    platform = UnreliablePlatform(random.Random(0), failure=failure)
    with pytest.raises(StageFailedError, match="given up after 4 attempts; the last said: no room for one sequence"):
        await run_stage(platform, shares_of(1, 2, 1))
    assert len(platform.sinks) == 4


async def test_a_later_driver_finds_what_the_first_had_published() -> None:
    platform = UnreliablePlatform(random.Random(0))
    await run_stage(platform, shares_of(3, 2, 1))
    generated = len(platform.generated)
    outcome = GenerationOutcome(sinks=list(platform.sinks))
    groups, _, _ = await run_stage(platform, shares_of(3, 2, 2), outcome=outcome, driver=2, retries=0)
    assert sorted(group.prompt for group in groups) == [0, 1, 2]
    assert len(platform.generated) == generated


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


async def test_nobody_is_cut_again_before_it_goes_on() -> None:
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


async def test_what_a_request_did_says_how_fast_its_instance_is() -> None:
    platform = UnreliablePlatform(random.Random(0))
    _, outcome, _ = await run_stage(platform, shares_of(3, 2, 2))
    assert [dict(stretch.tokens) for stretch in outcome.stretches] == [
        {(0, 0): 0, (1, 0): 1, (2, 0): 2},
        {(0, 1): 1, (1, 1): 2, (2, 1): 3},
    ]
    assert all(set(stretch.begun.values()) == {0} for stretch in outcome.stretches)
