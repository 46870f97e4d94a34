"""Jobs whose learner begins while the batch is still being generated, and what their journals hold."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.planner.step.generation import GroupForecast
from rlhfless_operator.planner.step.pace import LearnerPace
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.records.settings_history import SettingsHistory
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.actors.generated import CompleteGroup
from rlhfless_operator.training.costs.cost_model import CostModel
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.journal import step_journal
from rlhfless_operator.training.journal.ledger import Ledger
from rlhfless_operator.training.requests.builder import RequestBuilder
from rlhfless_operator.training.stages import rollout
from tests.training.whole_jobs import (
    assert_equal_weights,
    final_weights,
    folder_of,
    status_of,
    train,
)

OVERLAPPED: dict[str, Any] = {"steps": 2, "batch": {"minibatchSamples": None}, "planning": {"policy": "cost"}}
PATIENCE = 120.0


class Overlap:
    """Has every step's learner begin at once, and its last group wait until the learner has nothing left to do."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        on_waiting: Callable[[str], bool] = lambda name: True,
        *,
        lets_go: bool = False,
    ) -> None:
        self.waits = self.steps = 0
        self._working: set[str] = set()
        self._on_waiting = on_waiting
        self._heard = asyncio.Event()
        plan, observe, prepare = CostModel.plan, Ledger.observe, rollout.prepare

        def plan_early(cost_model: CostModel, *arguments: Any, **named: Any) -> GenerationPlan:
            made = plan(cost_model, *arguments, **named)
            expected = dict.fromkeys(made.estimates, 0.0)
            planned = dataclasses.replace(made.planned, groups=GroupForecast(expected, expected, 0.0))
            return dataclasses.replace(made, planned=planned)

        def listen(ledger: Ledger, change: StateChange) -> None:
            observe(ledger, change)
            if change.stage == "learning":
                self._hear(change)

        def prepare_late(platform: Any, groups: AsyncIterator[CompleteGroup], expected: int, *rest: Any, **named: Any):
            self._heard.clear()
            self.steps += 1
            return prepare(platform, self._last_held_back(groups, expected), expected, *rest, **named)

        monkeypatch.setattr(CostModel, "plan", plan_early)
        monkeypatch.setattr(LearnerPace, "begins", lambda pace, now, *rest: now)
        monkeypatch.setattr(LearnerPace, "lets_go", lambda pace, now, expected, again: lets_go)
        monkeypatch.setattr(Ledger, "observe", listen)
        monkeypatch.setattr(rollout, "prepare", prepare_late)
        # Journals go with their batches, once a checkpoint holds what was learnt from them.
        monkeypatch.setattr(step_journal, "remove_garbage", lambda *arguments: None)

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


async def stop_once_its_learner_waits(file: Path, monkeypatch: pytest.MonkeyPatch, *, pieces: int = 0) -> None:
    """Run a job whose last group never comes, until its learner waits and so many pieces are written down."""
    waiting = asyncio.Event()

    def never_go_on(name: str) -> bool:
        if len(journal_of(file, 1)) >= pieces:
            waiting.set()
        return False

    with monkeypatch.context() as patched:
        Overlap(patched, never_go_on)
        running = asyncio.create_task(train(file))
        await asyncio.wait_for(waiting.wait(), PATIENCE)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def journal_of(file: Path, step: int) -> list[dict[str, Any]]:
    """The pieces of a step, as they were written down."""
    folder = folder_of(file) / "batches" / f"step-{step:06d}" / "pieces"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def learn_again(file: Path, where: Path) -> None:
    """Take a finished job's steps again with one fresh learner, from their recorded batches, and compare weights."""
    job = load_job(file).resolve_paths(file.parent)
    folder = JobFolder(str(folder_of(file)))
    steps = status_of(file)["step"]
    batches = [
        StepBatch.model_validate(artifacts.read_json(folder.result("batch", step))).batch
        for step in range(1, steps + 1)
    ]
    builder = RequestBuilder(job, folder, "again")
    base = RLHFJobStatus(
        uid="again", weights=builder.initial if steps == 1 else WeightsReference(version=steps - 1, uri="")
    )
    request = builder.learn(base, batches[-1], batches[:-1], SettingsHistory(), steps, checkpoint_due=False, attempt=0)
    request = request.model_copy(update={"publish": str(where), "result": str(where) + ".json"})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        Learner().run(request, TaskContext(emit=lambda event: None))
    finally:
        # Denormals are this process's too: Hypothesis refuses to draw floats without them.
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    again = {name: tensor for path in where.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert_equal_weights(again, final_weights(file))
