"""Rollouts that are made ahead, with a real journal and rollouts that come and fail as a test says."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, GroupResult, PrepareResult, SampleTask, WeightsReference
from rlhfless_operator.job.asynchrony import AsyncSpec
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.journal import PlanRecord, StepBatch
from rlhfless_operator.training.asynchronous import rollouts_ahead
from rlhfless_operator.training.asynchronous.rollouts_ahead import RolloutsAhead
from rlhfless_operator.training.data.cursor import DataCursor
from rlhfless_operator.training.journal.async_journal import AsyncJournal
from rlhfless_operator.training.journal.budget import BudgetExhaustedError
from rlhfless_operator.training.requests.tasks import StageFailedError
from rlhfless_operator.training.stages.rollout import RolloutTask
from rlhfless_operator.training.stages.unscorable import UnscorableError

Script = Callable[[RolloutTask], Awaitable[None]]
"""What a rollout does before it is complete."""
PLAN = PlanRecord(
    policy="even",
    actors=1,
    expected_seconds=1,
    expected_instance_seconds=1,
    cheapest_instance_seconds=1,
    lower_bound_instance_seconds=1,
    prefixes="no",
)


class Draws:
    """A job's prompts: eight of them, and so many steps."""

    def __init__(self, steps: int) -> None:
        self.total_steps = steps
        self.cursor = DataCursor(8, 0, shuffle=False)

    def go_to(self, position: dict[str, Any]) -> None:
        self.cursor = self.cursor.restored(position)

    def tokens(self, purpose: str) -> list[int]:
        return [5] * 8


def prepared(task: RolloutTask) -> PrepareResult:
    """All groups of a rollout in one chunk."""
    groups = [GroupResult(prompt=prompt, reward=1.0, spread=0.5) for prompt in task.prompts or []]
    return PrepareResult(part=f"chunk-{task.step}", groups=groups, metrics={})


async def completes(task: RolloutTask) -> None:
    assert task.on_prepared is not None
    task.on_prepared(prepared(task))


@asynccontextmanager
async def making(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    scripts: dict[int, Script],
    *,
    most: int = 1,
    rule: Literal["wait", "drop", "downweight"] = "wait",
    steps: int = 8,
    affords: Callable[..., None] = lambda *arguments: None,
) -> AsyncIterator[RolloutsAhead]:
    """Rollouts of one group each; those that have no script are complete at once."""

    under_way: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    class Live:
        async def room(self, step: int, weights: object, *, beside: int) -> None:
            await under_way[beside].wait()

        def release(self, step: int) -> None: ...

        async def close(self) -> None: ...

    async def roll_out(run: Any, task: RolloutTask, on_planned: Any) -> StepBatch:
        under_way[task.step].set()
        await scripts.get(task.step, completes)(task)
        samples = [SampleTask(prompt=prompt, index=0) for prompt in task.prompts or []]
        batch = BatchReference(step=task.step, parts=[f"chunk-{task.step}"], samples=samples)
        return StepBatch(batch=batch, cursor={}, lengths={}, metrics={}, plan=PLAN, seconds={})

    async def at_once(*arguments: Any, **options: Any) -> None: ...

    monkeypatch.setattr(rollouts_ahead, "roll_out", roll_out)
    monkeypatch.setattr(rollouts_ahead, "open_live_actors", lambda *arguments: Live())
    monkeypatch.setattr(rollouts_ahead, "check_affordable", affords)
    job = JobFolder(str(folder))
    run: Any = SimpleNamespace(
        folder=job,
        spec=SimpleNamespace(batch=SimpleNamespace(prompts_per_step=1, samples_per_prompt=1)),
        requests=SimpleNamespace(
            algorithm=SimpleNamespace(dynamic_sampling_rounds=None),
            learns_in_pieces=False,
            weights=lambda published: published,
        ),
        prompts=Draws(steps),
        cost_model=SimpleNamespace(history=SimpleNamespace(mean=lambda name: 0.0), measured=lambda *learnt: None),
        draft_history=SimpleNamespace(generated=lambda number, lengths: None),
        progress=SimpleNamespace(begin_step=lambda *arguments, **options: None),
        prefixes=SimpleNamespace(reason="no: one actor"),
    )
    status = SimpleNamespace(step=0, weights=WeightsReference(version=0, uri="w"))
    journal: Any = SimpleNamespace(
        status=status, published=status, kept_batches_from=1, records=[], budget=lambda: None, written=at_once
    )
    settings = AsyncSpec(max_staleness=most, too_stale=rule)
    async with RolloutsAhead(run, journal, AsyncJournal(job), settings) as ahead:
        yield ahead


async def learn(ahead: RolloutsAhead, step: int) -> list[int | None]:
    """Take a step and have it done; returns the rollouts of its groups."""
    taken, _ = await asyncio.wait_for(ahead.take(step, lambda: None), 10)
    assert ahead.report()[0] is not None, "the step's record has a plan"
    ahead._journal.status.step = step
    ahead._journal.status.weights = WeightsReference(version=step, uri="w")
    ahead.position(step)
    ahead.advance()
    return [group.rollout for group in taken.groups]


def begun(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (folder / "journal").glob("*-begun.json"))


async def test_once_a_rollout_has_failed_what_is_begun_is_learnt_from_and_nothing_more_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = asyncio.Event()

    async def fails_late(task: RolloutTask) -> None:
        await fail.wait()
        raise StageFailedError("its instances are lost")

    async with making(tmp_path, monkeypatch, {1: fails_late}, most=2, rule="downweight") as ahead:
        assert await learn(ahead, 1) == [2]
        assert await learn(ahead, 2) == [3]
        fail.set()
        await asyncio.wait([ahead._rollouts[1]])
        # Two more were admitted meanwhile.
        assert await learn(ahead, 3) == [4]
        assert await learn(ahead, 4) == [5]
        with pytest.raises(StageFailedError, match="its instances are lost"):
            await learn(ahead, 5)
    assert begun(tmp_path) == [1, 2, 3, 4, 5]


async def test_a_rollout_that_the_budget_has_no_room_for_begins_once_a_step_has_left_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is begun may take less than its forecast. The job stops where nothing that is begun is left."""
    asked: list[tuple[int, int]] = []

    def affords(run: Any, journal: Any, step: int) -> None:
        asked.append((step, journal.status.step))
        # The third and fourth rollout fit in once two steps are done, and the sixth never does.
        if step >= 6 or (step >= 3 and journal.status.step < 2):
            raise BudgetExhaustedError(f"step {step} is not begun")

    async with making(tmp_path, monkeypatch, {}, most=2, affords=affords) as ahead:
        assert await learn(ahead, 1) == [1]
        async with asyncio.timeout(10):
            # The second one may be written down a little later.
            while begun(tmp_path) != [1, 2]:
                await asyncio.sleep(0.01)
        for step in range(2, 6):
            assert await learn(ahead, step) == [step]
        with pytest.raises(BudgetExhaustedError, match="step 6 is not begun"):
            await learn(ahead, 6)
    assert begun(tmp_path) == [1, 2, 3, 4, 5]
    assert (6, 5) in asked, "asked once more when all steps before it were done"


async def test_groups_that_are_to_be_scored_again_are_not_learnt_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cannot_be_scored(task: RolloutTask) -> None:
        await completes(task)
        raise UnscorableError("no reward scored them")

    async with making(tmp_path, monkeypatch, {2: cannot_be_scored}) as ahead:
        await asyncio.wait(ahead._rollouts.values())
        with pytest.raises(UnscorableError, match="no reward scored them"):
            await learn(ahead, 1)
    assert not list((tmp_path / "journal").glob("*-taken.json"))


async def test_a_driver_that_finds_all_groups_of_the_first_step_prepared_has_a_plan_for_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver before it died after preparation, and before the step took the groups."""
    folder = JobFolder(str(tmp_path)).batches(1, "training")

    async def dies(task: RolloutTask) -> None:
        artifacts.write_json(artifacts.join(folder, "chunk-1-0000.json"), prepared(task).model_dump(mode="json"))
        await asyncio.Event().wait()

    async with making(tmp_path, monkeypatch, {1: dies}):
        async with asyncio.timeout(10):
            while not artifacts.exists(artifacts.join(folder, "chunk-1-0000.json")):
                await asyncio.sleep(0.01)

    async def plans_late(task: RolloutTask) -> None:
        await asyncio.sleep(0.2)

    async with making(tmp_path, monkeypatch, {1: plans_late, 2: plans_late}) as ahead:
        assert ahead.groups is not None
        assert ahead.groups.buffer.has_enough()
        assert await learn(ahead, 1) == [1]


async def test_garbage_collection_spares_rollouts_that_are_about_to_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with making(tmp_path, monkeypatch, {}, most=3) as ahead:
        assert begun(tmp_path) == []
        assert ahead.position(0)["needs"]["last"] == 4
