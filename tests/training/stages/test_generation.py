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
    NextWeights,
    Progress,
    SampleTask,
    WeightsReference,
)
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.requests.tasks import StageFailedError
from tests.training.generating import RandomMoves, UnreliablePlatform, make_request, run_stage, settings_of, shares_of
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


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    actors=st.integers(1, 5),
    loss=st.sampled_from([0.0, 0.2]),
    moves=st.sampled_from([0.0, 0.2]),
    publishing=st.sampled_from([0.02, 0.2]),
    willing=st.sampled_from([0.0, 0.5, 1.0]),
)
async def test_newer_weights_are_taken_between_requests_and_never_given_back(
    seed: int, actors: int, loss: float, moves: float, publishing: float, willing: float
) -> None:
    chance = random.Random(seed)
    platform = UnreliablePlatform(chance, loss=loss)
    published = [WeightsReference(version=1, uri="w")]

    def newest() -> WeightsReference:
        if chance.random() < publishing:
            published.append(WeightsReference(version=published[-1].version + 1, uri="w"))
        return published[-1]

    changes = {
        "weights": SamplingWeights(published[0], newest),
        "is_worth_switching": lambda actor: chance.random() < willing,
        # Each new version may cut a request before it has finished a sample.
        "retries": 1000,
    }
    groups, outcome, held = await run_stage(platform, shares_of(5, 4, actors), RandomMoves(chance, moves), **changes)
    assert sorted(group.prompt for group in groups) == list(range(5))
    assert len(platform.generated) == 20, "what is published is never generated again"
    assert all(versions == sorted(versions) for versions in platform.asked.values())
    assert outcome.switches < len(outcome.sinks)
    assert willing > 0 or outcome.switches == 0
    assert held[-1] == 0 and not platform.held


async def test_a_published_version_cuts_the_actors_that_are_behind_once() -> None:
    platform = UnreliablePlatform(random.Random(0))
    first, second = (WeightsReference(version=version, uri="w") for version in (1, 2))
    weights = SamplingWeights(first, lambda: second if len(platform.generated) > 2 else first)
    _, outcome, _ = await run_stage(platform, shares_of(4, 2, 2), weights=weights)
    assert outcome.switches == 2
    assert outcome.cuts == outcome.moved == 0
    assert len(outcome.sinks) == 4
    assert {tuple(versions) for versions in platform.asked.values()} == {(1,), (1, 2)}
    assert outcome.pauses == []
    assert len(outcome.switch_pauses) == 2


@pytest.mark.parametrize(
    ("says", "newest", "switches"),
    [
        ([1, 1, 2], 2, True),
        ([1, 1, 1], 2, False),
        ([None], 2, True),
        pytest.param([1, 2], 3, True, id="it was not told of the newest"),
        pytest.param([1, 1], 3, False, id="it fetches an older one"),
    ],
)
async def test_an_actor_is_not_cut_before_its_instance_is_ready_for_newer_weights(
    says: list[int | None], newest: int, switches: bool
) -> None:
    first, second, third = (WeightsReference(version=version, uri="w") for version in (1, 2, newest))
    told: list[int | None] = []

    class Prefetching(UnreliablePlatform):
        async def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
            async for event in super().run(request):
                yield event
                if request.weights == first and len(told) < len(says):
                    told.append(says[len(told)])
                    yield Progress(finished=0, running=1, waiting=0, tokens=1, prefetched_version=told[-1])

    def announcing(attempt: ActorAttempt) -> GenerationRequest:
        upcoming = [NextWeights(weights=second)] if attempt.weights == first else []
        return make_request(attempt).model_copy(update={"next_weights": upcoming})

    platform = Prefetching(random.Random(0))
    weights = SamplingWeights(first, lambda: third if told else first, 1)
    _, outcome, _ = await run_stage(platform, shares_of(4, 2, 1), weights=weights, make_request=announcing)
    assert told == says
    assert outcome.switches == switches
    assert any(newest in versions for versions in platform.asked.values()) == switches


async def test_a_rollout_that_finishes_with_its_weights_is_not_cut() -> None:
    platform = UnreliablePlatform(random.Random(0))
    _, outcome, _ = await run_stage(platform, shares_of(4, 2, 2))
    assert outcome.switches == 0
    assert {tuple(versions) for versions in platform.asked.values()} == {(2,)}


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
