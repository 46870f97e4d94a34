"""Learning that begins while the batch is still being generated: the journal says what is learnt, whatever happens."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest

from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.step.pace import LearnerPace
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.status import CheckpointStatus
from rlhfless_operator.training.costs.cost_model import CostModel
from rlhfless_operator.training.instances.capacity import Capacity
from rlhfless_operator.training.journal.ledger import Ledger
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.requests.builder import RequestBuilder
from tests.command_line import run_command
from tests.processes import named
from tests.training.asynchronous.test_loop import replayed
from tests.training.killing import start
from tests.training.overlapping import (
    OVERLAPPED,
    PATIENCE,
    Overlap,
    journal_of,
    learn_again,
    stop_once_its_learner_waits,
)
from tests.training.whole_jobs import (
    MakeJob,
    assert_equal_weights,
    final_weights,
    folder_of,
    records_of,
    run_job,
    status_of,
)

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


@pytest.fixture(autouse=True)
def gpus_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of GPUs: enough for all stages at once."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")


def test_groups_are_learnt_from_as_they_arrive_and_the_journal_says_how(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap = Overlap(monkeypatch)
    file = tiny_job("arrival", **OVERLAPPED)
    run_job(file)
    assert overlap.waits >= 2
    for record in records_of(file):
        waited = record["metrics"]["seconds/wait"]
        assert waited > 0
        # A learner that waits is charged as one that does nothing.
        assert record["ledger"]["learning"]["idle"] >= 0.5 * waited
        assert record["stages"]["learning"] <= record["metrics"]["seconds"]
    job = load_job(file)
    for step in (1, 2):
        pieces = journal_of(file, step)
        assert len(pieces) > 1
        prompts = [sample["prompt"] for piece in pieces for sample in piece["samples"]]
        assert len(prompts) == job.spec.batch.prompts_per_step * job.spec.batch.samples_per_prompt
        assert len(set(prompts)) == job.spec.batch.prompts_per_step
    learn_again(file, tmp_path / "again")


def test_a_learner_that_is_killed_in_mid_step_goes_by_the_journal(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    written: list[Any] = []

    def kill_the_first(name: str) -> bool:
        if not journal_of(file, 1):
            return False
        if not killed:
            (victim,) = named(name)
            victim.kill()
            killed.append(name)
            written.extend(journal_of(file, 1))
            return False
        return name not in killed

    Overlap(monkeypatch, kill_the_first)
    file = tiny_job("killed", **OVERLAPPED)
    run_job(file)
    assert killed and written
    assert journal_of(file, 1)[: len(written)] == written
    learn_again(file, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["generation", "preparation"])
def test_a_run_whose_groups_come_late_from_an_instance_that_is_killed_is_replayed_bit_for_bit(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    killed: list[str] = []
    observe = Ledger.observe

    def kill_the_first_at_work(ledger: Ledger, change: StateChange) -> None:
        observe(ledger, change)
        if change.stage == stage and change.state == "busy" and not killed:
            killed.append(change.instance)
            (victim,) = named(change.instance)
            victim.kill()

    monkeypatch.setattr(Ledger, "observe", kill_the_first_at_work)
    Overlap(monkeypatch)
    file = tiny_job(f"killed-{stage}", **OVERLAPPED)
    run_job(file)
    assert killed
    assert len(journal_of(file, 1)) > 1
    assert "2 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
def test_a_driver_that_is_gone_in_mid_step_is_gone_on_from_by_the_journal(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_job("stopped", **OVERLAPPED)
    asyncio.run(stop_once_its_learner_waits(file, monkeypatch, pieces=1))
    written = journal_of(file, 1)
    assert written and status_of(file)["step"] == 0
    Overlap(monkeypatch)
    run_job(file)
    assert journal_of(file, 1)[: len(written)] == written
    learn_again(file, tmp_path / "again")


def wait_until_gone(file: Path) -> None:
    """Until the job's driver has ended: one that was started warm is killed a moment after what stands in its place."""
    for lease in (folder_of(file) / "leases").glob("??????.json"):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(json.loads(lease.read_text())["pid"]).wait(PATIENCE)


def test_a_driver_that_is_killed_is_gone_on_from_by_the_journal(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_job("killed-driver", **OVERLAPPED)
    driver = start(run_command(file), tmp_path / "log.txt")
    deadline = time.monotonic() + PATIENCE
    while not journal_of(file, 1):
        assert driver.poll() is None and time.monotonic() < deadline, (tmp_path / "log.txt").read_text()
        time.sleep(0.01)
    driver.kill()
    driver.wait()
    wait_until_gone(file)
    written = journal_of(file, 1)
    Overlap(monkeypatch)
    run_job(file)
    assert journal_of(file, 1)[: len(written)] == written
    learn_again(file, tmp_path / "again")


@pytest.mark.slow
def test_a_learner_that_waits_for_long_is_let_go_and_asked_again(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: set[str] = set()

    def go_on_once_another_waits(name: str) -> bool:
        waited.add(name)
        return len(waited) > 1

    Overlap(monkeypatch, go_on_once_another_waits, lets_go=True)
    file = tiny_job("let-go", **OVERLAPPED)
    run_job(file)
    assert len(waited) > 1
    learn_again(file, tmp_path / "again")


@pytest.mark.slow
def test_a_learner_that_follows_saves_its_state_between_steps_and_another_goes_on(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save = StepJournal.saved

    def observe(journal: StepJournal, checkpoint: CheckpointStatus) -> None:
        saved.append(checkpoint.step)
        save(journal, checkpoint)

    overlap = Overlap(monkeypatch)
    # Each step has work for a learner once the one of the step before has gone.
    monkeypatch.setattr(
        LearnerPace, "begins", lambda pace, now, *rest: now if len(saved) >= overlap.steps - 1 else now + 100
    )
    # On a quick machine hardly anything is left of the rollout.
    monkeypatch.setattr(Capacity, "switch_seconds", lambda capacity, stage: 0.0)
    # On a busy machine a plan may find that all instances stay.
    monkeypatch.setattr(Capacity, "stay", AsyncMock())
    monkeypatch.setattr(CostModel, "saves_state", lambda costs, steps: True)
    monkeypatch.setattr(CostModel, "letting_go_seconds", lambda costs, steps: 0.0)
    monkeypatch.setattr(StepJournal, "saved", observe)
    file = tiny_job("saves", **{**OVERLAPPED, "steps": 3})
    run_job(file)
    assert saved == [1, 2]
    assert overlap.waits >= 3
    learn_again(file, tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, False),
        ({"learning": {"overlap": "never"}}, True),
        ({"batch": {"minibatchSamples": 8}}, True),
        ({"batch": {"minibatchSamples": 16}}, False),
        ({"algorithm": {"epochs": 2}}, True),
        ({"algorithm": {"name": "ppo"}}, True),
        ({"algorithm": {"name": "dapo"}}, True),
        ({"algorithm": {"name": "dapo", "dynamicSamplingRounds": 0}}, False),
        ({"async": {}}, False),
        ({"planning": {"policy": "even"}}, True),
    ],
)
def test_only_what_asks_nothing_of_the_whole_batch_is_learnt_in_pieces(
    tiny_job: MakeJob, changes: dict[str, Any], whole: bool
) -> None:
    job: RLHFJob = load_job(tiny_job("job", **{**OVERLAPPED, **changes}))
    assert RequestBuilder(job, JobFolder("folder"), "uid").learns_in_pieces is not whole


def test_where_a_learner_has_no_gpus_beside_an_actor_it_waits_for_the_whole_batch(tiny_job: MakeJob) -> None:
    job = load_job(tiny_job("job", **OVERLAPPED))
    assert not RequestBuilder(job, JobFolder("folder"), "uid", sleeps=True, overlaps=False).learns_in_pieces


def test_on_cpus_alone_a_learner_waits_for_the_whole_batch_and_two_runs_have_the_same_bits(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file, never = (tiny_job(name, **OVERLAPPED, learning={"overlap": name}) for name in ("auto", "never"))
    for each in (file, never):
        run_job(each)
    assert journal_of(file, 1) == []
    assert_equal_weights(final_weights(file), final_weights(never))
