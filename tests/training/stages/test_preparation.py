"""Groups are prepared in chunks as they come: large ones while many are left, and single groups at the end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions import artifacts
from rlhfless_functions.api import Done, GroupResult, JournalledPiece, PrepareResult, SampleTask, piece_uri
from rlhfless_operator.platforms.base import InstanceLostError
from rlhfless_operator.training.actors.generated import CompleteGroup
from rlhfless_operator.training.actors.prepared import PreparationOutcome
from rlhfless_operator.training.instances.instance_queue import InstanceQueue
from rlhfless_operator.training.stages.preparation import prepare, prepared_before
from tests.training.generating import CountedCapacity

GROUPS = 36


class Instant:
    """A platform whose preparation takes no time; what it was asked for."""

    def __init__(self) -> None:
        self.chunks: list[tuple[str, list[int]]] = []

    async def run(self, request: Any) -> AsyncIterator[Done]:
        part, groups = request
        self.chunks.append((part, [group.prompt for group in groups]))
        found = [GroupResult(prompt=group.prompt, reward=1.0, spread=1.0) for group in groups]
        yield Done(result=PrepareResult(part=f"{part}.parquet", groups=found, metrics={}).model_dump(mode="json"))


async def one_by_one(prompts: Sequence[int]) -> AsyncIterator[CompleteGroup]:
    for prompt in prompts:
        # Preparation has time to finish what it has begun.
        for _ in range(20):
            await asyncio.sleep(0)
        yield CompleteGroup(prompt, [SampleTask(prompt=prompt, index=0)], [1], [])


async def at_once(prompts: range) -> AsyncIterator[CompleteGroup]:
    for prompt in prompts:
        yield CompleteGroup(prompt, [SampleTask(prompt=prompt, index=0)], [1], [])


def sizes(
    *,
    follows: bool,
    outcome: PreparationOutcome | None = None,
    groups: Callable[[range], AsyncIterator[CompleteGroup]] = one_by_one,
) -> list[int]:
    platform, told = Instant(), []

    async def on_prepared(result: PrepareResult) -> None:
        told.append([group.prompt for group in result.groups])

    async def prepare_all() -> None:
        async with InstanceQueue("preparation", CountedCapacity()).part(1, 1) as instances:  # type: ignore[arg-type]
            await prepare(
                platform,  # type: ignore[arg-type]
                groups(range(GROUPS)),
                GROUPS,
                lambda part, groups, attempt: (part, groups),  # type: ignore[arg-type,return-value]
                outcome or PreparationOutcome(),
                instances=instances,
                driver=3,
                retries=0,
                on_prepared=on_prepared if follows else None,
                followed=follows,
            )

    asyncio.run(prepare_all())
    if follows:
        assert told == [prompts for _, prompts in platform.chunks]
    return [len(prompts) for _, prompts in platform.chunks]


def test_a_step_is_six_chunks_where_nobody_waits_for_them() -> None:
    assert sizes(follows=False) == [6] * 6


def test_chunks_become_smaller_where_a_learner_takes_them_as_they_come() -> None:
    found = sizes(follows=True)
    assert sum(found) == GROUPS
    assert found == sorted(found, reverse=True)
    assert found[0] == 6
    assert found[-6:] == [1] * 6


def test_a_learner_waits_for_no_large_chunk_even_if_all_groups_are_there() -> None:
    """One chunk of all that had waited was prepared for 9 s, in which the learner idled, and learnt from after it."""
    assert sizes(follows=True, groups=at_once) == sizes(follows=True)
    assert sizes(follows=False, groups=at_once) == [GROUPS]


class Slow:
    """A platform whose chunks take as long as they are told to, and lose their instances as often.

    Args:
        ticks: of each chunk, in the order in which they begin.
        losses: chunks whose first attempt loses its instance.
    """

    def __init__(self, ticks: Sequence[int], losses: Sequence[int] = ()) -> None:
        self.ticks, self.losses = ticks, losses
        self.attempts: dict[str, int] = {}
        self.prompts: list[int] = []
        self.at_work = self.most = 0

    async def run(self, request: Any) -> AsyncIterator[Done]:
        part, groups = request.key.part, request.groups
        self.attempts[part] = self.attempts.get(part, 0) + 1
        number = list(self.attempts).index(part)
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        try:
            for _ in range(self.ticks[number % len(self.ticks)]):
                await asyncio.sleep(0)
            if number in self.losses and self.attempts[part] == 1:
                raise InstanceLostError("killed")
        finally:
            self.at_work -= 1
        found = [GroupResult(prompt=group.prompt, reward=1.0, spread=1.0) for group in groups]
        self.prompts += [group.prompt for group in groups]
        yield Done(result=PrepareResult(part=f"{part}.parquet", groups=found, metrics={}).model_dump(mode="json"))


def prepare_beside(platform: Slow, preparers: int, *, beside: int = 0) -> tuple[PreparationOutcome, list[list[int]]]:
    """Prepare a step's groups on several instances; what came of it, and what a learner was told.

    Args:
        beside: preparers of another rollout that is under way, whose groups are none yet.
    """
    outcome, told, telling = PreparationOutcome(), [], 0

    async def on_prepared(result: PrepareResult) -> None:
        nonlocal telling
        telling += 1
        assert telling == 1, "the journal is told of one chunk at a time"
        await asyncio.sleep(0)
        told.append([group.prompt for group in result.groups])
        telling -= 1

    async def prepare_all() -> None:
        queue = InstanceQueue("preparation", CountedCapacity())  # type: ignore[arg-type]
        async with queue.part(1, preparers) as instances, queue.part(2, max(1, beside)):
            await prepare(
                platform,  # type: ignore[arg-type]
                one_by_one(range(GROUPS)),
                GROUPS,
                lambda part, groups, attempt: SimpleNamespace(
                    key=SimpleNamespace(stage="preparation", step=1, part=part), groups=groups
                ),  # type: ignore[arg-type,return-value]
                outcome,
                instances=instances,
                driver=3,
                retries=1,
                on_prepared=on_prepared,
            )

    asyncio.run(prepare_all())
    return outcome, told


@given(st.integers(1, 5), st.lists(st.integers(0, 400), min_size=1, max_size=8), st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_each_group_is_prepared_once_on_no_more_instances_than_there_are(
    preparers: int, ticks: list[int], beside: int
) -> None:
    platform = Slow(ticks)
    outcome, told = prepare_beside(platform, preparers, beside=beside)
    assert sorted(platform.prompts) == sorted(outcome.groups) == list(range(GROUPS))
    assert sorted(prompt for chunk in told for prompt in chunk) == list(range(GROUPS))
    assert platform.most <= preparers
    assert all(count == 1 for count in platform.attempts.values()), "no two chunks have one name"
    assert sorted(platform.attempts) == [f"chunk-3-{number:04d}" for number in range(len(platform.attempts))]


def test_instances_share_what_waits() -> None:
    assert prepare_beside(platform := Slow([1000]), 3)[0].groups.keys() == set(range(GROUPS))
    assert platform.most == 3


def test_a_lost_instance_affects_its_chunk_alone() -> None:
    # The pause before another attempt is real.
    platform = Slow([300], losses=[1])
    outcome, _ = prepare_beside(platform, 2)
    assert sorted(outcome.groups) == list(range(GROUPS))
    assert platform.attempts.pop("chunk-3-0001") == 2
    assert set(platform.attempts.values()) == {1}


def test_what_an_earlier_driver_has_prepared_is_not_prepared_again() -> None:
    before = PreparationOutcome()
    groups = [GroupResult(prompt=prompt, reward=1.0, spread=1.0) for prompt in range(GROUPS - 3)]
    before.add(PrepareResult(part="earlier", groups=groups, metrics={}))
    assert sizes(follows=True, outcome=before) == [1, 1, 1]


def test_a_journal_beside_the_chunks_is_none_of_them(tmp_path: Path) -> None:
    folder = str(tmp_path / "step-000001")
    result = PrepareResult(part="part", groups=[GroupResult(prompt=4, reward=1.0, spread=1.0)], metrics={})
    artifacts.write_json(f"{folder}/chunk-1-0000.json", result.model_dump(mode="json"))
    piece = JournalledPiece(samples=[SampleTask(prompt=4, index=0)], parts=["part"])
    artifacts.write_json(piece_uri(f"{folder}/pieces", 0), piece.model_dump(mode="json"))
    assert prepared_before(folder).chunks == {"part": [4]}
