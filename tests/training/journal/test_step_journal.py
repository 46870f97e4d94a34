"""What a driver writes down, in which order, and what of it counts when a write fails."""

import asyncio
import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, LearnResult, SampleTask, WeightsReference
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.journal import PlanRecord, StepBatch
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.journal.lease import Lease, LeaseLostError
from rlhfless_operator.training.journal.step_journal import StepJournal, committed_records, read_status
from tests.jobs import job

SPEC = job(steps=3).spec


def journal_of(folder: Path, status: RLHFJobStatus | None = None) -> StepJournal:
    return StepJournal(SPEC, JobFolder(str(folder)), Lease.acquire(str(folder)), status or RLHFJobStatus(uid="uid"))


def batch(step: int) -> StepBatch:
    reference = BatchReference(step=step, parts=[f"part-{step}"], samples=[SampleTask(prompt=0, index=0)])
    plan = PlanRecord(
        policy="even",
        actors=1,
        expected_seconds=1,
        expected_instance_seconds=1,
        cheapest_instance_seconds=1,
        lower_bound_instance_seconds=1,
        prefixes="no",
    )
    return StepBatch(
        batch=reference, cursor={}, lengths={0: [4]}, metrics={"reward": 0.5}, plan=plan, seconds={"generation": 0.0}
    )


def learned(step: int) -> LearnResult:
    return LearnResult(weights=WeightsReference(version=step, uri=f"weights-{step}"), metrics={"seconds": 0.0})


async def commit(journal: StepJournal, step: int) -> None:
    await journal.commit(step, batch(step), learned(step), None, lambda: {"cursor": {"position": step}})


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_finished_step_is_in_the_folder_before_its_status_is_told(tmp_path: Path) -> None:
    journal, folder, told = journal_of(tmp_path), JobFolder(str(tmp_path)), []

    def tell(status: RLHFJobStatus) -> None:
        assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]
        assert Path(folder.progress(1)).exists()
        told.append(status.step)

    journal.on_status = tell
    journal.ledger.observe(StateChange("i", "generation", "starting", 1.0))
    journal.ledger.observe(StateChange("i", "generation", "ended", 3.0))
    await commit(journal, 1)
    await journal.written()
    assert told == [1]
    assert artifacts.read_json(folder.progress(1)) == {"cursor": {"position": 1}}
    (span,) = lines(tmp_path / "ledger.jsonl")
    assert (span["instance"], span["state"], span["end"] - span["start"]) == ("i@1", "starting", 2.0)
    status = read_status(folder)
    assert status is not None and status.weights is not None
    assert (status.step, status.weights.version, status.instance_seconds) == (1, 1, 2.0)


async def test_what_comes_after_the_last_step_is_charged_to_it_until_all_instances_are_gone(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    for step in (1, 2):
        await commit(journal, step)
    now = time.monotonic()
    journal.ledger.observe(StateChange("i", "learning", "busy", now - 7.0))
    journal.ledger.observe(StateChange("i", "learning", "draining", now - 2.0))
    settling = asyncio.create_task(journal.settle(within=60.0))
    await asyncio.sleep(0)
    assert not settling.done(), "the instance is there still"
    journal.ledger.observe(StateChange("i", "learning", "ended", now))
    await settling
    first, last = lines(tmp_path / "metrics.jsonl")
    assert first["ledger"]["learning"]["busy"] == 0
    assert (last["step"], last["ledger"]["learning"]["busy"], last["ledger"]["learning"]["draining"]) == (2, 5.0, 2.0)
    assert [span["state"] for span in lines(tmp_path / "ledger.jsonl")] == ["busy", "draining"]
    status = read_status(JobFolder(str(tmp_path)))
    assert status is not None
    assert status.instance_seconds == pytest.approx(7.0)
    assert status.cost == SPEC.prices.instance_hour * 7 / 3600


async def test_a_step_that_drivers_stopped_in_has_taken_what_all_of_them_took(tmp_path: Path) -> None:
    """Otherwise its record is that of a short, cheap step, and the budget's forecast goes by it."""
    status = None
    for _ in range(2):
        stopped = journal_of(tmp_path, status)
        now = time.monotonic()
        stopped.ledger.observe(StateChange("i", "generation", "busy", now - 30.0))
        stopped.ledger.observe(StateChange("i", "generation", "ended", now))
        await stopped.leave("Suspended", "the budget is spent")
        stopped.lease.release()
        status = read_status(JobFolder(str(tmp_path)))
        assert status is not None
    assert status is not None and status.unfinished["generation"]["busy"] == pytest.approx(60.0)

    later = journal_of(tmp_path, status)
    now = time.monotonic()
    later.ledger.observe(StateChange("j", "learning", "busy", now - 5.0))
    later.ledger.observe(StateChange("j", "learning", "ended", now))
    await commit(later, 1)
    (record,) = later.records
    assert record.ledger["generation"].busy == pytest.approx(60.0)
    assert record.ledger["learning"].busy == pytest.approx(5.0)
    assert (later.status.unfinished, later.status.instance_seconds) == ({}, pytest.approx(65.0))
    assert record.cost == pytest.approx(later.status.cost, abs=Decimal("0.000003")), "nothing is charged twice"
    assert later.status.recent_steps[-1].cost == pytest.approx(record.cost, abs=Decimal("0.000003"))


async def test_an_instance_that_does_not_end_is_charged_for_as_long_as_it_is_waited_for(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    await commit(journal, 1)
    journal.ledger.observe(StateChange("i", "learning", "draining", time.monotonic() - 2.0))
    await journal.settle(within=0.0)
    assert journal.status.instance_seconds == pytest.approx(2.0, abs=1.0)


async def test_another_driver_goes_on_after_the_records_that_the_status_names(tmp_path: Path) -> None:
    first = journal_of(tmp_path)
    for step in (1, 2):
        await commit(first, step)
    await first.written()
    first.lease.release()
    later = journal_of(tmp_path, first.status.model_copy(update={"step": 1}))
    later.read_records()
    assert [record.step for record in later.records] == [1], "step 2 is not done by that status"
    await commit(later, 2)
    await later.written()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("left", [0, 1, 2])
async def test_records_that_were_cut_are_an_error_with_a_remedy(tmp_path: Path, left: int) -> None:
    first = journal_of(tmp_path)
    for step in (1, 2, 3):
        await commit(first, step)
    await first.written()
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    for rest in (b"", whole[left][:-9]):
        file.write_bytes(b"".join(whole[:left]) + rest)
        told = (
            rf"metrics\.jsonl lacks the record of step {left + 1 if left else 3}.*restore it from a copy, or remove it"
        )
        with pytest.raises(artifacts.ArtifactCorruptError, match=told):
            committed_records(JobFolder(str(tmp_path)), first.status)
    file.unlink()
    assert committed_records(JobFolder(str(tmp_path)), first.status) == []


async def test_after_a_write_that_failed_the_job_is_where_it_was_written_down(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    await commit(journal, 1)
    await journal.written()
    rightful = journal.lease.check

    def lost() -> None:
        raise LeaseLostError("another driver has taken this job over")

    journal.lease.check = lost  # type: ignore[method-assign]
    await commit(journal, 2)
    with pytest.raises(LeaseLostError):
        await journal.written()
    with pytest.raises(LeaseLostError):
        journal.heed_writes()
    journal.lease.check = rightful  # type: ignore[method-assign]
    await journal.leave("Interrupted", "stopped")
    status = read_status(JobFolder(str(tmp_path)))
    assert status is not None
    assert (status.step, status.phase, [record.step for record in journal.records]) == (1, "Interrupted", [1])


async def test_batches_since_the_checkpoint_are_there_for_any_driver(tmp_path: Path) -> None:
    first = journal_of(tmp_path)
    for step in (1, 2):
        first.keep_batch(step, batch(step))
    await first.written()
    first.lease.release()
    expected = [batch(1).batch, batch(2).batch]
    assert await asyncio.to_thread(first.batches_since_checkpoint, 3) == expected
    assert await asyncio.to_thread(journal_of(tmp_path).batches_since_checkpoint, 3) == expected
