"""A platform that loses instances, rules that move samples, and the generation stage run on both."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from rlhfless_functions.api import (
    AddSamples,
    Done,
    Event,
    Failed,
    FinishedSample,
    GenerationRequest,
    GenerationResult,
    Leave,
    Line,
    Preload,
    Progress,
    Samples,
    SampleTask,
    Shelter,
    Stage,
    Started,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.settings import ModelSettings, SamplingSettings
from rlhfless_operator.planner.moves.migration import Actor, Migration, Move
from rlhfless_operator.platforms.base import InstanceLostError, TaskFailedError
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.training.actors import looks
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.instances.instance_queue import InstanceQueue
from rlhfless_operator.training.stages.generation import generate
from rlhfless_operator.training.stages.generation_settings import GenerationSettings

Key = tuple[int, int]


@pytest.fixture(scope="module")
def every_look_is_quick() -> Iterator[None]:
    """On a busy machine a look at the rule takes long, and the next one would come after the end."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(looks, "_SHARE", math.inf)
        yield


@dataclass
class UnreliablePlatform:
    """Generates samples, takes in what joins, remembers what each sink holds, and loses instances as told."""

    chance: random.Random
    loss: float = 0.0
    drain: float = 0.0
    wait: float = 0.0
    """Chance, after each sample, that all others wait for their environments."""
    sinks: dict[str, set[Key]] = field(default_factory=dict)
    generated: list[Key] = field(default_factory=list)
    part_of: dict[Key, str] = field(default_factory=dict)
    held: set[Key] = field(default_factory=set)
    lines: list[Line] = field(default_factory=list)
    together: int = 0
    """Number of times that samples were taken back from an instance before it had taken others in."""
    running: int = 0
    most_running: int = 0
    cut: int = 0
    failure: Failed | None = None

    async def run(self, request: LiveRequest) -> AsyncGenerator[Event, None]:
        assert request.sink not in self.sinks, "two requests write one sink"
        batch: list[Key] = []
        before: set[Key] = set()
        received = 0

        def join(samples: Sequence[SampleTask], resume_from: Sequence[str]) -> None:
            nonlocal received
            keys = [(sample.prompt, sample.index) for sample in samples]
            assert not self.held & set(keys), "two instances hold one sample"
            self.held.update(keys)
            batch.extend(keys)
            before.update(*(self.sinks[sink] for sink in resume_from))
            received += len(keys)

        inbox: list[Line | None] = []

        async def read() -> None:
            lines = request.lines()
            while inbox[-1:] != [None]:
                inbox.append(await anext(lines, None))

        reader = asyncio.create_task(read())
        join(request.samples, request.resume_from)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        waits = is_over = ended = False
        mine = self.sinks[request.sink] = set()
        try:
            yield Started(instance="i")
            if self.failure is not None:
                raise TaskFailedError(self.failure)
            while batch or not is_over:
                # Time passes, as on a real stream: the others speak in between.
                await asyncio.sleep(0)
                lines, inbox[:] = list(inbox), []
                self.together += {AddSamples, Leave} <= {type(line) for line in lines}
                for line in lines:
                    if line is None:
                        is_over = True
                        continue
                    self.lines.append(line)
                    assert line.sink == request.sink
                    if isinstance(line, AddSamples):
                        join(line.samples, line.resume_from)
                        yield Progress(finished=0, running=0, waiting=0, tokens=0, received=received)
                    else:
                        self.held -= set(batch)
                        batch.clear()
                        yield Done(result={}, of=line.sink)
                if not batch:
                    continue
                key = batch.pop(0)
                if key not in before:
                    self.generated.append(key)
                mine.add(key)
                self.held.discard(key)
                finished = FinishedSample(prompt=key[0], index=key[1], tokens=sum(key), finish_reason="stop")
                # What had been generated before is announced as what it was.
                part = self.part_of.setdefault(key, f"{request.sink}/{len(mine)}")
                yield Samples(samples=[finished], part=part, of=request.sink)
                if self.chance.random() < self.loss:
                    ended = True
                    raise InstanceLostError("killed")
                if self.chance.random() < self.drain:
                    break
                if waits := self.chance.random() < self.wait:
                    break
            ended = True
            result = GenerationResult(
                finished=0, unfinished=0, parts=[], prompt_tokens=0, response_tokens=0, all_wait=waits
            )
            yield Done(result=result.model_dump())
        finally:
            reader.cancel()
            try:
                await asyncio.sleep(0)
            finally:
                self.held -= set(batch)
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
        weights=attempt.weights,
        oldest_version=1,
        prompts="p",
        samples=attempt.samples,
        sampling=SamplingSettings(),
        seed=0,
        sink=attempt.sink,
        resume_from=attempt.resume_from,
        known_until=attempt.known_until,
    )


def shares_of(groups: int, size: int, actors: int, first: int = 0) -> list[list[SampleTask]]:
    prompts = range(first, first + groups)
    samples = [SampleTask(prompt=prompt, index=index) for prompt in prompts for index in range(size)]
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
        "weights": WeightsReference(version=2, uri="w"),
        "look_seconds": 0.0,
        **changes,
    }
    return GenerationSettings(**arguments)  # type: ignore[arg-type]


class Waiting:
    """Environments that answer after a while."""

    async def shelter(self) -> Shelter:
        return Shelter(url="http://127.0.0.1:1", token="t", rollout="training-3", actors=2, patience_seconds=1)

    async def come(self, samples: Sequence[Key]) -> None:
        for _ in samples:
            await asyncio.sleep(0)


@dataclass
class CountedCapacity:
    """Remembers how many instances were asked for."""

    sleeps = False
    counts: list[int] = field(default_factory=list)
    let_gone: int = 0

    async def let_go(self, stage: Stage) -> None:
        self.let_gone += 1

    async def use(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        self.counts.append(count)


async def run_stage(
    platform: UnreliablePlatform,
    shares: list[list[SampleTask]],
    rule: object = None,
    outcome: GenerationOutcome | None = None,
    arrivals: AsyncIterator[list[list[SampleTask]]] | None = None,
    **changes: object,
) -> tuple:
    async def plans() -> AsyncGenerator[GenerationPlan, None]:
        assert arrivals is not None
        async for arrived in arrivals:
            yield SimpleNamespace(shares=arrived)  # type: ignore[misc]

    outcome = outcome or GenerationOutcome(sinks=[])
    capacity = CountedCapacity()
    async with InstanceQueue("generation", capacity).part(3, len(shares)) as instances:  # type: ignore[arg-type]
        groups = [
            group
            async for group in generate(
                platform,
                shares,
                outcome,
                settings_of(**changes),
                migration=migration_of(rule),
                instances=instances,
                on_event=lambda actor, event: None,
                arrivals=None if arrivals is None else plans(),
            )
        ]
    return groups, outcome, capacity.counts[1:]
