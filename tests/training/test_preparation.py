"""Groups are prepared in chunks as they come: large ones while many are left, and single groups at the end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import Done, GroupResult, JournalledPiece, PrepareResult, SampleTask, piece_uri
from rlhfless_operator.training.generated import CompleteGroup
from rlhfless_operator.training.instance_queue import InstanceQueue
from rlhfless_operator.training.preparation import PreparationOutcome, prepare, prepared_before
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


def sizes(*, follows: bool, outcome: PreparationOutcome | None = None) -> list[int]:
    platform, told = Instant(), []

    async def on_prepared(result: PrepareResult) -> None:
        told.append([group.prompt for group in result.groups])

    async def prepare_all() -> None:
        async with InstanceQueue("preparation", CountedCapacity()).part(1, 1) as instances:  # type: ignore[arg-type]
            await prepare(
                platform,  # type: ignore[arg-type]
                one_by_one(range(GROUPS)),
                GROUPS,
                lambda part, attempt, groups: (part, groups),  # type: ignore[arg-type,return-value]
                outcome or PreparationOutcome(),
                instances=instances,
                driver=3,
                retries=0,
                on_prepared=on_prepared if follows else None,
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


def test_what_an_earlier_driver_has_prepared_is_not_prepared_again() -> None:
    before = PreparationOutcome()
    groups = [GroupResult(prompt=prompt, reward=1.0, spread=1.0) for prompt in range(GROUPS - 3)]
    before.add(PrepareResult(part="earlier", groups=groups, metrics={}))
    assert sizes(follows=True, outcome=before) == [1, 1, 1]


@pytest.mark.parametrize("overlap", ["auto", "ordered"])
def test_a_journal_beside_the_chunks_is_none_of_them(tmp_path: Path, overlap: str) -> None:
    folder = str(tmp_path / "step-000001")
    result = PrepareResult(part="part", groups=[GroupResult(prompt=4, reward=1.0, spread=1.0)], metrics={})
    artifacts.write_json(f"{folder}/chunk-1-0000.json", result.model_dump(mode="json"))
    piece = JournalledPiece(samples=[SampleTask(prompt=4, index=0)], parts=["part"])
    artifacts.write_json(piece_uri(f"{folder}/pieces-{overlap}", 0), piece.model_dump(mode="json"))
    assert prepared_before(folder).chunks == {"part": [4]}
