"""The generation stage: whatever happens to instances, every group comes out once and whole."""

import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

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
    Samples,
    SampleTask,
    Started,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.settings import ModelSettings, SamplingSettings
from rlhfless_operator.platforms.base import InstanceLostError, TaskFailedError
from rlhfless_operator.training.generation import GenerationOutcome, NeverCut, generate
from rlhfless_operator.training.tasks import StageFailedError

Key = tuple[int, int]


@dataclass
class UnreliablePlatform:
    """Generates samples, remembers what each sink holds, and loses instances as told."""

    chance: random.Random
    loss: float = 0.0
    drain: float = 0.0
    sinks: dict[str, set[Key]] = field(default_factory=dict)
    generated: list[Key] = field(default_factory=list)
    cut: int = 0
    failure: Failed | None = None

    async def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        assert request.sink not in self.sinks, "two requests write one sink"
        mine = self.sinks[request.sink] = set()
        before = set().union(*(self.sinks[sink] for sink in request.resume_from))
        ended = False
        try:
            yield Started(instance="i")
            if self.failure is not None:
                raise TaskFailedError(self.failure)
            for number, sample in enumerate(request.samples):
                key = (sample.prompt, sample.index)
                if key not in before:
                    self.generated.append(key)
                mine.add(key)
                finished = FinishedSample(prompt=key[0], index=key[1], tokens=sum(key), finish_reason="stop")
                yield Samples(samples=[finished], part=f"{request.sink}/{number}")
                if self.chance.random() < self.loss:
                    ended = True
                    raise InstanceLostError("killed")
                if self.chance.random() < self.drain:
                    break
            ended = True
            result = GenerationResult(finished=0, unfinished=0, parts=[], prompt_tokens=0, response_tokens=0)
            yield Done(result=result.model_dump())
        finally:
            self.cut += not ended


@dataclass
class RandomCuts:
    chance: random.Random
    probability: float

    def observe(self, actor: int, event: Event) -> None:
        pass

    def should_cut(self, actor: int) -> bool:
        return self.chance.random() < self.probability


def make_request(
    part: str, attempt: int, samples: list[SampleTask], sink: str, resume_from: list[str]
) -> GenerationRequest:
    return GenerationRequest(
        key=TaskKey(job_uid="u", step=3, stage="generation", part=part, attempt=attempt),
        result=f"{sink}/result.json",
        model=ModelSettings(source="m"),
        weights=WeightsReference(version=2, uri="w"),
        prompts="p",
        samples=samples,
        sampling=SamplingSettings(),
        seed=0,
        sink=sink,
        resume_from=resume_from,
    )


def shares_of(groups: int, size: int, actors: int) -> list[list[SampleTask]]:
    samples = [SampleTask(prompt=prompt, index=index) for prompt in range(groups) for index in range(size)]
    return [samples[actor::actors] for actor in range(actors) if samples[actor::actors]]


async def run_stage(platform: UnreliablePlatform, shares: list[list[SampleTask]], **changes: object) -> tuple:
    outcome = GenerationOutcome(sinks=[])
    released: list[None] = []

    async def release() -> None:
        released.append(None)

    arguments = {"migration": NeverCut(), "retries": 3, **changes}
    groups = [
        group
        async for group in generate(
            platform,
            shares,
            make_request,
            outcome,
            sink_root="sinks",
            driver=1,
            on_event=lambda actor, event: None,
            on_share_done=release,
            **arguments,
        )
    ]
    return groups, outcome, len(released)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    actors=st.integers(1, 6),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    drain=st.sampled_from([0.0, 0.2]),
    cuts=st.sampled_from([0.0, 0.2]),
)
async def test_every_group_comes_out_once_and_whole(
    seed: int, actors: int, loss: float, drain: float, cuts: float
) -> None:
    chance = random.Random(seed)
    platform = UnreliablePlatform(chance, loss=loss, drain=drain)
    migration = RandomCuts(chance, cuts)
    groups, outcome, released = await run_stage(platform, shares_of(5, 4, actors), migration=migration)
    assert sorted(group.prompt for group in groups) == list(range(5))
    for group in groups:
        assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
        assert group.lengths == [group.prompt + index for index in range(4)]
    assert len(platform.generated) == 20, "what is published is never generated again"
    assert released == actors, "each actor's instance is released once"
    assert outcome.cuts == platform.cut


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

    async def release() -> None:
        pass

    groups = [
        group.prompt
        async for group in generate(
            platform,
            shares_of(3, 2, 2),
            make_request,
            outcome,
            sink_root="sinks",
            driver=2,
            retries=0,
            migration=NeverCut(),
            on_event=lambda actor, event: None,
            on_share_done=release,
        )
    ]
    assert sorted(groups) == [0, 1, 2]
    assert len(platform.generated) == generated
