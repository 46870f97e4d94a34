"""The generation stage: every group comes out once and whole, also if instances are lost."""

import random
from collections.abc import AsyncGenerator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.api import (
    Event,
    Failed,
    GenerationRequest,
    SampleTask,
)
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.requests.tasks import StageFailedError
from tests.training.generating import RandomMoves, UnreliablePlatform, Waiting, run_stage, settings_of, shares_of
from tests.training.generating import every_look_is_quick as every_look_is_quick

pytestmark = pytest.mark.usefixtures("every_look_is_quick")


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
    groups, _, held = await run_stage(platform, shares_of(5, 4, actors), rule)
    assert sorted(group.prompt for group in groups) == list(range(5))
    for group in groups:
        assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
        assert group.lengths == [group.prompt + index for index in range(4)]
        assert group.parts == sorted({platform.part_of[group.prompt, index] for index in range(4)})
    assert len(platform.generated) == 20, "what is published is never generated again"
    assert held[-1] == 0, "every instance is released in the end"
    assert all(before != after for before, after in pairwise([actors, *held])), "told of changes alone"
    assert platform.most_running <= max([actors, *held]), "no more instances are asked than are held"
    assert platform.cut == 0, "no stream is cut to move samples"
    assert not platform.held


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    actors=st.integers(1, 6),
    loss=st.sampled_from([0.0, 0.2]),
    moves=st.sampled_from([0.0, 0.2]),
)
async def test_an_actor_whose_samples_all_wait_gives_its_instance_away_and_goes_on(
    seed: int, actors: int, loss: float, moves: float
) -> None:
    chance = random.Random(seed)
    platform = UnreliablePlatform(chance, loss=loss, wait=0.4)
    rule = RandomMoves(chance, moves)
    groups, outcome, held = await run_stage(platform, shares_of(5, 4, actors), rule, away=Waiting())
    assert sorted(group.prompt for group in groups) == list(range(5))
    assert len(platform.generated) == 20, "what is published is never generated again"
    assert held[-1] == 0
    assert platform.most_running <= max([actors, *held])
    assert moves or 0 in held[:-1] or max(held) > 1 or outcome.let_go_seconds == 0, (
        "the only actor's instance is let go"
    )


async def test_a_failure_that_no_instance_can_mend_ends_the_stage_with_its_message() -> None:
    failure = Failed(reason="model_unloadable", message="the tokenizer has more entries", retryable=False)
    platform = UnreliablePlatform(random.Random(0), failure=failure)
    with pytest.raises(StageFailedError, match="the tokenizer has more entries"):
        await run_stage(platform, shares_of(2, 2, 2))


async def test_samples_that_an_instance_can_not_store_end_the_request_though_its_body_is_open() -> None:
    class Full(UnreliablePlatform):
        async def run(self, request: LiveRequest) -> AsyncGenerator[Event, None]:
            message = "no space left on the device"
            yield Failed(reason="artifact_unwritable", message=message, retryable=False, of=request.sink)
            async for _ in request.lines():
                pass

    with pytest.raises(StageFailedError, match="no space left"):
        await run_stage(Full(random.Random(0)), shares_of(2, 2, 1))


async def test_a_share_that_never_progresses_is_given_up_after_its_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failed(reason="out_of_memory", message="no room for one sequence", retryable=True)
    platform = UnreliablePlatform(random.Random(0), failure=failure)
    with pytest.raises(StageFailedError, match="given up after 4 attempts; the last said: no room for one sequence"):
        await run_stage(platform, shares_of(1, 2, 1))
    assert len(platform.sinks) == 4


async def test_an_instance_that_is_lost_once_all_of_its_samples_are_stored_is_not_missed() -> None:
    platform = UnreliablePlatform(random.Random(0), loss=1.0)
    groups, outcome, _ = await run_stage(platform, shares_of(2, 1, 2), retries=0)
    assert len(groups) == 2
    assert outcome.lost == 0


async def test_a_later_driver_finds_what_the_first_had_published() -> None:
    platform = UnreliablePlatform(random.Random(0))
    await run_stage(platform, shares_of(3, 2, 1))
    generated = len(platform.generated)
    outcome = GenerationOutcome(sinks=list(platform.sinks))
    groups, _, _ = await run_stage(platform, shares_of(3, 2, 2), outcome=outcome, driver=2, retries=0)
    assert sorted(group.prompt for group in groups) == [0, 1, 2]
    assert len(platform.generated) == generated


async def test_a_later_round_looks_only_where_its_samples_may_be() -> None:
    platform = UnreliablePlatform(random.Random(0))
    await run_stage(platform, shares_of(2, 2, 1))
    outcome = GenerationOutcome(sinks=list(platform.sinks))
    looked: list[list[str]] = []
    generated = settings_of().make_request

    def make_request(attempt: ActorAttempt) -> GenerationRequest:
        looked.append(attempt.resume_from)
        return generated(attempt)

    for first in (0, 2):
        shares = [[SampleTask(prompt=first + prompt, index=index) for prompt in range(2) for index in range(2)]]
        await run_stage(platform, shares, outcome=outcome, driver=2, make_request=make_request)
    assert looked == [outcome.before, outcome.before]
    assert len(outcome.before) == 1
    assert sorted(outcome.lengths) == [(prompt, index) for prompt in range(4) for index in range(2)]


async def test_what_a_request_did_says_how_fast_its_instance_is() -> None:
    platform = UnreliablePlatform(random.Random(0))
    _, outcome, _ = await run_stage(platform, shares_of(3, 2, 2))
    assert [dict(stretch.tokens) for stretch in outcome.stretches] == [
        {(0, 0): 0, (1, 0): 1, (2, 0): 2},
        {(0, 1): 1, (1, 1): 2, (2, 1): 3},
    ]
    assert all(set(stretch.begun.values()) == {0} for stretch in outcome.stretches)
