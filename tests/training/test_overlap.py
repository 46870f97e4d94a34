"""Learning that begins while the batch is still being generated: the same weights, whatever happens on the way."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.job.validation import load_job
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training import rollout
from rlhfless_operator.training.cost_model import CostModel
from rlhfless_operator.training.generated import CompleteGroup
from rlhfless_operator.training.ledger import Ledger
from rlhfless_operator.training.planning import GenerationPlan
from rlhfless_operator.training.requests import RequestBuilder
from tests.processes import named
from tests.training.whole_jobs import (
    MakeJob,
    assert_equal_weights,
    final_weights,
    records_of,
    run_job,
    status_of,
    train,
)

OVERLAPPED: dict[str, Any] = {
    "steps": 2,
    "batch": {"minibatchSamples": None},
    "learning": {"overlap": "auto"},
}
PATIENCE = 120.0

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


class Overlap:
    """Has every step's learner begin at once, and its last group wait until the learner has nothing left to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_waiting: Callable[[str], bool] = lambda name: True) -> None:
        self.waits = 0
        self._working: set[str] = set()
        self._on_waiting = on_waiting
        self._heard = asyncio.Event()
        plan, observe, prepare = CostModel.plan, Ledger.observe, rollout.prepare

        def plan_early(cost_model: CostModel, *arguments: Any, **named: Any) -> GenerationPlan:
            return dataclasses.replace(plan(cost_model, *arguments, **named), learning_begins=0.0)

        def listen(ledger: Ledger, change: StateChange) -> None:
            observe(ledger, change)
            if change.stage == "learning":
                self._hear(change)

        def prepare_late(platform: Any, groups: AsyncIterator[CompleteGroup], expected: int, *rest: Any, **named: Any):
            self._heard.clear()
            return prepare(platform, self._last_held_back(groups, expected), expected, *rest, **named)

        monkeypatch.setattr(CostModel, "plan", plan_early)
        monkeypatch.setattr(Ledger, "observe", listen)
        monkeypatch.setattr(rollout, "prepare", prepare_late)

    def _hear(self, change: StateChange) -> None:
        if change.state == "busy":
            self._working.add(change.instance)
        elif change.state == "idle" and change.instance in self._working:
            self.waits += 1
            if self._on_waiting(change.instance):
                self._heard.set()

    async def _last_held_back(
        self, groups: AsyncIterator[CompleteGroup], expected: int
    ) -> AsyncIterator[CompleteGroup]:
        count = 0
        async for group in groups:
            count += 1
            if count == expected:
                await asyncio.wait_for(self._heard.wait(), PATIENCE)
            yield group


@pytest.fixture(scope="module")
def unoverlapped(shared_tiny_job: MakeJob) -> Path:
    """A job that takes its batches in the same pieces, each once it is complete."""
    file = shared_tiny_job("unoverlapped", **OVERLAPPED)
    run_job(file)
    return file


def test_learning_under_the_tail_gives_the_same_weights(
    tiny_job: MakeJob, unoverlapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all("seconds/wait" not in record["metrics"] for record in records_of(unoverlapped))
    overlap = Overlap(monkeypatch)
    file = tiny_job("overlapped", **OVERLAPPED)
    run_job(file)
    assert_equal_weights(final_weights(file), final_weights(unoverlapped))
    assert overlap.waits >= 2
    for record in records_of(file):
        waited = record["metrics"]["seconds/wait"]
        assert waited > 0
        # A learner that waits is charged as one that does nothing.
        assert record["ledger"]["learning"]["idle"] >= 0.5 * waited
        assert record["stages"]["learning"] <= record["metrics"]["seconds"]


def test_a_learner_that_is_killed_while_it_waits_costs_nothing_but_time(
    tiny_job: MakeJob, unoverlapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []

    def kill_the_first(name: str) -> bool:
        if not killed:
            (victim,) = named(name)
            victim.kill()
            killed.append(name)
            return False
        return name not in killed

    Overlap(monkeypatch, kill_the_first)
    file = tiny_job("killed", **OVERLAPPED)
    run_job(file)
    assert killed
    assert_equal_weights(final_weights(file), final_weights(unoverlapped))


def test_a_driver_that_stops_while_its_learner_waits_is_gone_on_from(
    tiny_job: MakeJob, unoverlapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_job("stopped", **OVERLAPPED)

    async def stop_once_it_waits() -> None:
        waiting = asyncio.Event()

        def never_go_on(name: str) -> bool:
            waiting.set()
            return False

        with monkeypatch.context() as patched:
            # The last group never comes: the driver stops before.
            Overlap(patched, never_go_on)
            running = asyncio.create_task(train(file))
            await asyncio.wait_for(waiting.wait(), PATIENCE)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    asyncio.run(stop_once_it_waits())
    assert status_of(file)["step"] == 0
    Overlap(monkeypatch)
    run_job(file)
    assert_equal_weights(final_weights(file), final_weights(unoverlapped))


def test_whenever_the_plan_begins_the_weights_are_the_same(tiny_job: MakeJob) -> None:
    file = tiny_job("planned", **{**OVERLAPPED, "steps": 4, "planning": {"policy": "cost"}})
    run_job(file)
    baseline = tiny_job("even", **{**OVERLAPPED, "steps": 4})
    run_job(baseline)
    assert_equal_weights(final_weights(file), final_weights(baseline))


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({}, 6),
        ({"learning": {"overlap": "never"}}, 1),
        ({"batch": {"minibatchSamples": 8}}, 1),
        ({"batch": {"minibatchSamples": 16}}, 6),
        ({"algorithm": {"epochs": 2}}, 1),
        ({"algorithm": {"name": "ppo"}}, 1),
        ({"algorithm": {"name": "dapo"}, "learning": {"overlap": "never"}}, 1),
    ],
)
def test_only_what_asks_nothing_of_the_whole_batch_is_learnt_in_pieces(
    tiny_job: MakeJob, changes: dict[str, Any], pieces: int
) -> None:
    job: RLHFJob = load_job(tiny_job("job", **{**OVERLAPPED, **changes}))
    assert RequestBuilder(job, JobFolder("folder"), "uid").pieces == pieces
