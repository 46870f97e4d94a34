"""Live actors: groups of several rollouts join their batches one by one, also if instances are lost."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.api import (
    AddSamples,
    Done,
    Event,
    Failed,
    FinishedSample,
    Join,
    Leave,
    NewWeights,
    NextWeights,
    Preload,
    Progress,
    Samples,
    SampleTask,
    Started,
    WeightsReference,
)
from rlhfless_functions.settings import ModelSettings
from rlhfless_operator.planner.moves.live_sizes import Batches
from rlhfless_operator.platforms.base import InstanceLostError, TaskFailedError
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.training.actors.generated import CompleteGroup, GenerationOutcome
from rlhfless_operator.training.actors.live_actor import Weights
from rlhfless_operator.training.actors.live_rollout import LiveRollout, LiveSettings
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.instances.instance_queue import InstanceQueue
from rlhfless_operator.training.requests.tasks import StageFailedError
from rlhfless_operator.training.stages import live_actors
from rlhfless_operator.training.stages.live_actors import LiveActors
from tests.training.generating import CountedCapacity, make_request

Key = tuple[int, int, int]
"""(rollout, prompt, index)"""


def weights_of(version: int) -> WeightsReference:
    return WeightsReference(version=version, uri=f"w{version}")


@dataclass
class LivePlatform:
    """Instances that decode in turns, take what joins them, and are lost as told."""

    chance: random.Random
    loss: float = 0.0
    drain: float = 0.0
    failure: Failed | None = None
    held: dict[Key, str] = field(default_factory=dict)
    """Sink that has each sample now."""
    published: dict[Key, str] = field(default_factory=dict)
    """Part with each finished sample."""
    generated: list[Key] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Samples in a batch, and those that wait anywhere, at every pass of an instance."""
    versions: dict[Key, list[int]] = field(default_factory=dict)
    lines: list[object] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    left: dict[Key, int] = field(default_factory=dict)
    """Passes that each sample needs still."""
    waits: object = None
    away: Callable[[dict[Key, str]], set[Key]] = field(default=lambda batch: set())
    """Which of a batch wait for their environments."""
    requests: list[LiveRequest] = field(default_factory=list)
    goes_on: asyncio.Event | None = None
    """Until it is set, the first instance stands still once it has started."""

    async def run(self, request: LiveRequest) -> AsyncGenerator[Event, None]:
        batch: dict[Key, str] = {}
        ended, version = False, request.weights.version
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)

        received = 0

        def join(sink: str, samples: list[SampleTask]) -> list[Event]:
            nonlocal received
            received += len(samples)
            events: list[Event] = []
            for sample in samples:
                key = (int(sink.split("/")[1]), sample.prompt, sample.index)
                assert key not in self.held, "two actors hold one sample"
                self.held[key] = batch[key] = sink
                if key in self.published:
                    events.append(finish(key))
            return events

        def finish(key: Key) -> Event:
            sink = batch.pop(key)
            del self.held[key]
            part = self.published.setdefault(key, f"{sink}/{key[1]}-{key[2]}")
            sample = FinishedSample(prompt=key[1], index=key[2], tokens=sum(key), finish_reason="stop")
            return Samples(samples=[sample], part=part, of=sink)

        reading = asyncio.create_task(anext(lines := request.lines(), None))
        try:
            yield Started(instance="i")
            if self.goes_on is not None and len(self.requests) == 1:
                await self.goes_on.wait()
            if self.failure is not None:
                raise TaskFailedError(self.failure)
            for event in join(request.sink, request.samples):
                yield event
            while not ended or batch:
                await asyncio.sleep(0)
                while reading.done():
                    line = reading.result()
                    self.lines.append(line)
                    found: list[Event] = []
                    match line:
                        case None:
                            ended = True
                            break
                        case Join():
                            assert line.request.weights.version == version
                            found = join(line.request.sink, line.request.samples)
                        case AddSamples():
                            found = join(line.sink, line.samples)
                        case NewWeights():
                            version = line.present.weights.version
                        case Leave():
                            for key in [key for key, sink in batch.items() if sink == line.sink]:
                                del batch[key], self.held[key]
                            found = [Done(result={}, of=line.sink)]
                    reading = asyncio.create_task(anext(lines, None))
                    for event in found:
                        yield event
                    await asyncio.sleep(0)
                self.loads.append((len(batch), self.waits() if callable(self.waits) else 0))
                away = self.away(batch)
                for key in list(batch):
                    if key not in batch or key in away:
                        continue
                    self.versions.setdefault(key, []).append(version)
                    self.left[key] = self.left.get(key, self.chance.randint(1, 8)) - 1
                    if self.left[key] <= 0:
                        self.generated.append(key)
                        yield finish(key)
                    if self.chance.random() < self.loss / 8:
                        raise InstanceLostError("killed")
                away &= batch.keys()
                present = len(batch) - len(away)
                yield Progress(
                    finished=0, running=present, waiting=len(away), away=len(away), tokens=0, version=version,
                    received=received,
                )  # fmt: skip
                if self.chance.random() < self.drain / 8:
                    break
                # Lines arrive before the next pass.
                for _ in range(4):
                    await asyncio.sleep(0)
            yield Done(result={})
        finally:
            reading.cancel()
            for key in batch:
                del self.held[key]
            self.running -= 1


def actors_on(platform: LivePlatform, is_last: Callable[[], bool] = lambda: False, *, act: bool = False) -> LiveActors:
    use = Weights(
        upcoming=lambda present: [NextWeights(weights=weights_of(present.version + 1))],
        source=lambda present: NextWeights(weights=present),
        preload=lambda present: Preload(model=ModelSettings(source="m"), weights=present),
        on_use=lambda started, version, size: None,
    )
    queue = InstanceQueue("generation", CountedCapacity())  # type: ignore[arg-type]
    return LiveActors(platform, queue, use, 10, is_last, act=act)  # type: ignore[arg-type]


def rollout_of(
    step: int, groups: int, size: int = 4, retries: int = 50, newest: Sequence[int] = (0,), *, switches: bool = True
) -> LiveRollout:
    """A rollout that begins with the newest weights, and goes on with newer ones if it switches."""
    samples = [[SampleTask(prompt=prompt, index=index) for index in range(size)] for prompt in range(groups)]
    weights = SamplingWeights(weights_of(newest[-1]), (lambda: weights_of(newest[-1])) if switches else None)
    given = LiveSettings(step, f"sinks/{step}", 1, retries, weights, make_request, lambda event: None)
    return LiveRollout(samples, GenerationOutcome(sinks=[]), given)


async def generate(live: LiveActors, rollout: LiveRollout, actors: int = 2, places: int = 8) -> list[CompleteGroup]:
    found = []
    async with live.generating(rollout, Batches(actors, places, places)):
        while (group := await rollout.complete.get()) is not None:
            found.append(group)
    if rollout.error is not None:
        raise rollout.error
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    actors=st.integers(1, 4),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    drain=st.sampled_from([0.0, 0.2]),
    switches=st.booleans(),
)
async def test_every_group_of_every_rollout_comes_out_once_and_whole(
    seed: int, actors: int, loss: float, drain: float, switches: bool
) -> None:
    platform, newest = LivePlatform(random.Random(seed), loss=loss, drain=drain), [0]
    live = actors_on(platform)

    async def rollouts() -> list[list[CompleteGroup]]:
        async def one(step: int) -> list[CompleteGroup]:
            if step > 1:
                await live.room(step, lambda: weights_of(newest[-1]), beside=step - 1)
            newest.append(step)
            return await generate(live, rollout_of(step, 5, newest=newest, switches=switches), actors)

        return await asyncio.gather(*(one(step) for step in (1, 2, 3)))

    for groups in await asyncio.wait_for(rollouts(), 60):
        assert sorted(group.prompt for group in groups) == list(range(5))
        for group in groups:
            assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
    assert len(platform.generated) == len(set(platform.generated)) == 60, "what is published is never generated again"
    for step in (1, 2, 3):
        for key in (key for key in platform.versions if key[0] == step):
            assert platform.versions[key] == sorted(platform.versions[key]), "weights never get older"
            assert switches or {*platform.versions[key]} == {step}, "it ends with the weights that it began with"
    assert platform.most_running <= actors
    assert not platform.held
    await live.close()


async def test_a_batch_is_full_while_groups_wait_and_goes_on_from_rollout_to_rollout() -> None:
    platform = LivePlatform(random.Random(1))
    live = actors_on(platform)
    platform.waits = lambda: live._waiting
    async with asyncio.TaskGroup() as tasks:
        for step in (1, 2, 3):
            tasks.create_task(generate(live, rollout_of(step, 8, size=1), actors=2, places=4))
    full = [load for load, waiting in platform.loads if waiting]
    assert full
    assert sum(full) >= 0.95 * 4 * len(full)
    opened = platform.most_running
    assert opened == 2
    assert sum(isinstance(line, Join) for line in platform.lines) == 2 * 3 - 2, "a share for a rollout, no new request"


async def test_newer_weights_are_sent_once_and_before_what_joins_with_them() -> None:
    platform, newest = LivePlatform(random.Random(2), left=dict.fromkeys([(1, 0, i) for i in range(4)], 40)), [3]
    live = actors_on(platform)
    rollout = rollout_of(1, 1, newest=newest)
    running = asyncio.create_task(generate(live, rollout, actors=1))
    while not platform.versions:
        await asyncio.sleep(0)
    newest.append(4)
    await running
    told = [line for line in platform.lines if isinstance(line, NewWeights)]
    assert [line.present.weights.version for line in told] == [4]
    named = [*platform.requests[0].next_weights, *told[0].next_weights]
    assert [each.weights.version for each in named] == [4, 5], "what may come next"
    assert {*platform.versions[1, 0, 0]} == {3, 4}
    assert rollout.outcome.switches == 1
    assert len(rollout.outcome.switch_pauses) == 1


async def test_an_actor_ends_once_nothing_is_left_to_do() -> None:
    platform = LivePlatform(random.Random(3))
    live = actors_on(platform)
    await generate(live, rollout_of(1, 3))
    while platform.running:
        await asyncio.sleep(0)
    assert not live._actors
    assert len(await generate(live, rollout_of(2, 3))) == 3, "and another begins with the next rollout"


@pytest.mark.parametrize("retryable", [True, False])
async def test_a_rollout_fails_when_it_is_lost_too_often(retryable: bool) -> None:
    failure = Failed(reason="out_of_memory", message="too little memory", retryable=retryable)
    platform = LivePlatform(random.Random(4), failure=failure)
    live = actors_on(platform)
    with pytest.raises(StageFailedError, match="too little memory"):
        await asyncio.wait_for(generate(live, rollout_of(1, 3, retries=3)), 30)
    assert live._rollouts == []


async def test_an_evaluation_that_waits_gets_the_next_actors_instance() -> None:
    platform = LivePlatform(random.Random(5))
    live = actors_on(platform)
    first = asyncio.create_task(generate(live, rollout_of(5, 8), actors=1, places=4))
    while not platform.versions:
        await asyncio.sleep(0)
    async with live._queue.part(4, 1) as part:
        await asyncio.wait_for(part.turn(), 30)
        assert not first.done(), "groups still wait"
        assert platform.running == 0
    await asyncio.wait_for(first, 30)


async def test_an_actor_is_cut_before_its_request_is_too_long_and_another_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platform = LivePlatform(random.Random(6), left={(1, 0, index): 5000 for index in range(4)})
    monkeypatch.setattr(live_actors, "LONGEST_SECONDS", 0.02)
    rollout = rollout_of(1, 1, retries=0)
    (group,) = await asyncio.wait_for(generate(actors_on(platform), rollout, actors=1), 60)
    assert len(group.samples) == 4
    assert len(rollout.outcome.sinks) > 1
    assert rollout.outcome.lost == 0


async def test_the_last_samples_of_older_weights_are_gathered_so_that_others_take_the_newer_ones() -> None:
    """Two actors with three and one sample left, each of 40 passes; a rollout with newer weights comes."""
    long = {(1, prompt, index): 40 for prompt in (0, 1) for index in range(4) if (prompt, index) != (1, 0)}
    platform, newest = LivePlatform(random.Random(7), left={**dict.fromkeys(long, 200)}), [1]
    for index in (1, 2, 3):
        platform.left[1, 1, index] = 1
    platform.left[1, 1, 0] = 200
    live = actors_on(platform)
    first = rollout_of(1, 2, newest=newest, switches=False)
    going_on = asyncio.create_task(generate(live, first, actors=2, places=5))
    while len(platform.generated) < 3:
        await asyncio.sleep(0)
    newest.append(2)
    await asyncio.wait_for(live.room(2, lambda: weights_of(newest[-1]), beside=1), 30)
    second = rollout_of(2, 1, newest=newest, switches=False)
    await asyncio.wait_for(generate(live, second, actors=2, places=5), 30)
    assert not going_on.done(), "the newer samples ended before the last older ones"
    await asyncio.wait_for(going_on, 60)
    assert first.outcome.moved == 1, "the actor with the fewest was emptied"
    assert platform.most_running == 2
    assert first.outcome.lost == second.outcome.lost == 0
    for key, versions in platform.versions.items():
        assert {*versions} == {key[0]}


async def test_the_last_samples_of_a_job_are_gathered_on_as_few_actors_as_they_need() -> None:
    left = {(1, prompt, index): 100 if index == 0 else 1 for prompt in range(4) for index in range(4)}
    platform, last = LivePlatform(random.Random(8), left=left), [False]
    live = actors_on(platform, lambda: last[0])
    rollout = rollout_of(1, 4, switches=False)
    task = asyncio.create_task(generate(live, rollout, actors=4, places=4))
    while len(platform.generated) < 12:
        await asyncio.sleep(0)
    assert platform.running == 4, "others may come"
    last[0] = True
    while platform.running > 1:
        await asyncio.sleep(0)
    assert not task.done()
    assert len(await asyncio.wait_for(task, 60)) == 4
    assert rollout.outcome.moved == 3
    assert len(platform.generated) == len(set(platform.generated)) == 16


async def test_no_sample_waits_while_an_actor_may_open() -> None:
    """Three of eight actors are enough for the expected batches, so these have all samples."""
    platform = LivePlatform(
        random.Random(10), left={(1, prompt, index): 60 for prompt in range(6) for index in range(4)}
    )
    live = actors_on(platform)

    async def generate_on_few() -> None:
        rollout = rollout_of(1, 6)
        async with live.generating(rollout, Batches(8, 12, 8)):
            while await rollout.complete.get() is not None:
                pass

    running = asyncio.create_task(generate_on_few())
    async with asyncio.timeout(30):
        while live._waiting or platform.most_running < 2:
            await asyncio.sleep(0)
    assert not platform.published
    await running
    # Where two have started first, these have room for all.
    assert platform.most_running <= 3


async def test_an_actor_without_samples_waits_for_a_rollout_that_comes() -> None:
    platform = LivePlatform(random.Random(9))
    live = actors_on(platform)
    coming = asyncio.create_task(live.room(2, lambda: weights_of(1), beside=1))
    await generate(live, rollout_of(1, 1, switches=False), actors=1, places=4)
    await asyncio.wait_for(coming, 30)
    for _ in range(100):
        await asyncio.sleep(0)
    assert platform.running == 1
    await generate(live, rollout_of(2, 1, newest=[1], switches=False), actors=1, places=4)
    assert [type(line) for line in platform.lines[:3]] == [Leave, NewWeights, Join], "and no new request"
    live.release(2)
    while platform.running:
        await asyncio.sleep(0)
