"""The files that record a driver's progress: status, records, accounts, and the batches that were learnt.

A later driver resumes from what is written down. This one continues at once. A step that was not written down is taken
again by the next driver, and comes to the same bits.
"""

import asyncio
import contextlib
import time
import uuid
import zlib
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from pydantic import ValidationError

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, ExampleSample, LearnResult, Stage
from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.forecast import forecast_cost
from rlhfless_operator.records.journal import JsonLines, StepBatch, read_lines
from rlhfless_operator.records.record import StepRecord, read_records
from rlhfless_operator.records.settings_history import SettingsHistory
from rlhfless_operator.records.status import CheckpointStatus, Phase, RLHFJobStatus
from rlhfless_operator.training.journal.async_journal import read_taken
from rlhfless_operator.training.journal.budget import used
from rlhfless_operator.training.journal.finished_step import record_of, record_with, spent_after, status_after
from rlhfless_operator.training.journal.garbage import remove_garbage, retention_of
from rlhfless_operator.training.journal.lease import Lease, LeaseLostError
from rlhfless_operator.training.journal.ledger import Account, Ledger
from rlhfless_operator.training.journal.samples import SamplesFile
from rlhfless_operator.training.journal.tracking import Tracking
from rlhfless_operator.training.journal.write_behind import WriteBehind

_LOOK_SECONDS = 0.05
_MOST_STATUS = 2**18
"""Most bytes of a status."""
"""Seconds between two looks at whether instances are gone."""


class StepJournal:
    """The status and the records of one job, kept by the driver that has its lease.

    Args:
        spec: the job's.
        folder: receives the files.
        lease: the fence of every write.
        status: as the last driver left it.
    """

    def __init__(self, spec: RLHFJobSpec, folder: JobFolder, lease: Lease, status: RLHFJobStatus) -> None:
        self.spec = spec
        self._folder = folder
        self.lease = lease
        self.status = status
        self.records: list[StepRecord] = []
        """Records of the finished steps."""
        self.settings = SettingsHistory()
        """Settings that each step is learnt with."""
        self.ledger = Ledger()
        self.budget: Callable[[], BudgetSpec | None] = lambda: spec.budget
        """Returns the budget as the job's user wants it now."""
        self._prices, self._gpus = spec.instance_prices, spec.instance_gpus
        self.tracking = Tracking({})
        self.on_status: Callable[[RLHFJobStatus], None] = lambda status: None
        """Called with every status once it is written."""
        self.committed_at = time.monotonic()
        """Time of the last finished step, in monotonic seconds."""
        self._clock_offset = status.seconds - self.committed_at
        self._behind = WriteBehind()
        self._published = status
        self._metrics = JsonLines(folder.file("metrics.jsonl"), [])
        self._spans = JsonLines(folder.file("ledger.jsonl"), [])
        self.samples = SamplesFile(folder.file("samples.jsonl"))
        self._batches: dict[int, bytes] = {}
        """Batches since the newest checkpoint, by step. They are compressed, because an operator may hold a thousand
        jobs."""

    def read_records(self) -> None:
        """Read earlier drivers' records of the finished steps."""
        self.records = committed_records(self._folder, self.status)
        self._metrics = JsonLines(
            self._folder.file("metrics.jsonl"), [record.model_dump(mode="json") for record in self.records]
        )
        spans = self._folder.file("ledger.jsonl")
        self._spans = JsonLines(spans, read_lines(spans))

    # --- money ---

    def spent(self, now: float) -> tuple[Decimal, float]:
        """Return the money and GPU-seconds of all drivers, the current step included.

        Args:
            now: monotonic seconds.
        """
        running = self.ledger.running(now)
        status = self.status
        return status.cost + running.cost(self._prices), status.gpu_seconds + running.gpu_seconds(self._gpus)

    def outlook(self, status: RLHFJobStatus) -> dict[str, Any]:
        """Return the status fields on future spending: the forecast, and the used share of the budget."""
        return {
            "forecast": forecast_cost(status.cost, self.records, status.steps),
            "budget_used": used(self.budget(), self.spec, status.cost, status.gpu_seconds),
        }

    # --- the status ---

    @property
    def published(self) -> RLHFJobStatus:
        """Status as it is written down."""
        return self._published

    async def update_status(self, **changes: Any) -> None:
        """Change the status and write it after all earlier writes; the lease is the fence.

        Raises:
            LeaseLostError: another driver has the job.
        """
        self._status_is(self.status.model_copy(update=changes))
        await self.written()

    def enter(self, stage: Stage) -> None:
        """Record the stage that begins."""
        self._status_is(self.status.model_copy(update={"stage": stage}))

    async def written(self) -> None:
        """Wait until everything is written.

        Raises:
            LeaseLostError: another driver has the job.
        """
        await self._behind.done()

    async def leave(self, phase: Phase, message: str) -> None:
        """Write this driver's last status, with what was spent since the last step.

        If a write has failed, the later ones never happened.

        Raises:
            LeaseLostError: another driver has the job.
        """
        try:
            await self.written()
        except (LeaseLostError, artifacts.ArtifactError):
            self._behind = WriteBehind()
            self.status = self._published
            self.records = [record for record in self.records if record.step <= self.status.step]
        account = self.ledger.close(time.monotonic())
        spent = spent_after(self.status, account, prices=self._prices, gpus=self._gpus)
        outlook = self.outlook(self.status.model_copy(update=spent))
        account.add(Account.of(self.status.unfinished))
        await self.update_status(phase=phase, message=message, unfinished=account.as_status(), **spent, **outlook)

    def heed_writes(self) -> None:
        """Raise the error of a write that has failed, if there is one."""
        self._behind.heed()

    # --- batches ---

    def keep_batch(self, step: int, batch: StepBatch) -> None:
        """Write a step's batch down for a later driver to learn from."""
        self._batches[step] = _compressed(batch.batch)
        self.keep_rollout(step, batch)

    def keep_rollout(self, number: int, rollout: StepBatch) -> None:
        """Write a complete rollout down whose groups several steps may learn from."""
        content, uri = rollout.model_dump(mode="json"), self._folder.result("batch", number)
        self._behind.add(lambda: self._under_lease(artifacts.write_json, uri, content))

    def learns_from(self, batch: BatchReference) -> None:
        """Note that a step learns from this batch, which is written down already."""
        self._batches[batch.step] = _compressed(batch)

    def batches_since_checkpoint(self, step: int) -> list[BatchReference]:
        """Return the batches of the steps between the newest checkpoint and `step`."""
        return [self._batch_of(earlier) for earlier in range(self.checkpoint_step + 1, step)]

    @property
    def checkpoint_step(self) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        return self.status.checkpoint.step if self.status.checkpoint else 0

    @property
    def kept_batches_from(self) -> int:
        """The first step whose batch a learner may need again: after the oldest checkpoint that is kept."""
        kept = self.spec.checkpoints
        # Learners that were let go have saved later states, which do not count.
        newest = self.checkpoint_step // kept.every_steps * kept.every_steps
        return max(0, newest - (kept.keep - 1) * kept.every_steps) + 1

    def go_back(self, older: CheckpointStatus | None) -> None:
        """Let learners start from an older checkpoint. The status says so once the step under way is done."""
        self.status = self.status.model_copy(update={"checkpoint": older})

    def saved(self, checkpoint: CheckpointStatus) -> None:
        """Let learners start from a checkpoint of the newest step, which was written after the step was done."""
        self._status_is(self.status.model_copy(update={"checkpoint": checkpoint}))
        self._forget_batches()

    async def remove_checkpoint(self, uri: str) -> None:
        """Remove a damaged checkpoint, which would count as one of those to keep.

        Raises:
            LeaseLostError: another driver has the job.
        """
        await self._under_lease(artifacts.remove, uri)

    def _batch_of(self, step: int) -> BatchReference:
        if step not in self._batches:
            taken = read_taken(self._folder, step) if self.spec.asynchronous is not None else None
            if taken is not None:
                batch = taken.batch
            else:
                batch = StepBatch.model_validate(artifacts.read_json(self._folder.result("batch", step))).batch
            self._batches[step] = _compressed(batch)
        return BatchReference.model_validate_json(zlib.decompress(self._batches[step]))

    # --- finished steps ---

    async def commit(
        self,
        step: int,
        batch: StepBatch | None,
        learned: LearnResult | None,
        evaluation: dict[str, float] | None,
        position: Callable[[], dict[str, Any]],
    ) -> StepRecord:
        """Write down a finished step (or step 0's evaluation). The status comes last: with it the step is done.

        Return before that is written, but not before the step before is.

        Args:
            position: the state that a later driver resumes from, besides the status.

        Raises:
            LeaseLostError: another driver has the job.
        """
        await self.written()
        now = time.monotonic()
        seconds, self.committed_at = now - self.committed_at, now
        account = self.ledger.close(now)
        prices, gpus, keep_best = self._prices, self._gpus, self.spec.checkpoints.best
        whole = Account.of(self.status.unfinished)
        whole.add(account)
        record = record_of(step, seconds, whole, batch, learned, evaluation, prices=prices, finished_at=time.time())
        self.records.append(record)
        status = status_after(self.status, record, account, learned, prices=prices, gpus=gpus, keep_best=keep_best)
        status = status.model_copy(update=self.outlook(status))
        at = position()
        self._write_records(record, batch.samples if batch else [], at)
        self._status_is(status)
        drafts, needs = list(map(int, at.get("drafts", {}))), at.get("needs", {})
        self._behind.add(lambda: self._conclude(record, status, drafts, needs))
        self._forget_batches()
        return record

    async def settle(self, within: float) -> None:
        """Charge the last step with what came after it: the export, and every instance until it is gone.

        Args:
            within: seconds to wait for released instances to go; later costs are not charged.

        Raises:
            LeaseLostError: another driver has the job.
        """
        deadline = time.monotonic() + within
        while self.ledger.instances() and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
        now = time.monotonic()
        seconds, self.committed_at = now - self.committed_at, now
        account = self.ledger.close(now)
        if not self.records:
            return
        self.records[-1] = record_with(self.records[-1], account, prices=self._prices)
        self._write_end(self.records[-1])
        spent = spent_after(self.status, account, prices=self._prices, gpus=self._gpus)
        outlook = self.outlook(self.status.model_copy(update=spent))
        await self.update_status(seconds=self.status.seconds + seconds, **spent, **outlook)

    def _forget_batches(self) -> None:
        self._batches = {kept: self._batches[kept] for kept in self._batches if kept > self.checkpoint_step}

    def _status_is(self, status: RLHFJobStatus) -> None:
        self.status = status
        content = status.model_dump(mode="json", by_alias=True)

        async def publish() -> None:
            await self._under_lease(artifacts.write_json, self._folder.file("status.json"), content)
            self._published = status
            self.on_status(status)

        self._behind.add(publish)

    def _write_end(self, record: StepRecord) -> None:
        """Write the last step's record as it is now, and the spans since."""
        spans = self._take_spans()

        async def write() -> None:
            await asyncio.gather(
                self._under_lease(self._metrics.replace_last, record.model_dump(mode="json")),
                self._under_lease(self._spans.append, *spans),
            )

        self._behind.add(write)

    def _take_spans(self) -> list[dict[str, Any]]:
        """Return the lines of `ledger.jsonl` for the spans that have ended since the last call."""
        offset = self._clock_offset
        return [
            {
                "instance": f"{span.instance}@{self.lease.number}",
                "stage": span.stage,
                "state": span.state,
                "start": round(span.start + offset, 6),
                "end": round(span.end + offset, 6),
            }
            for span in self.ledger.take_spans()
        ]

    def _write_records(self, record: StepRecord, samples: list[ExampleSample], position: dict[str, Any]) -> None:
        spans = self._take_spans()

        async def write() -> None:
            # In parallel, because a store takes its time for each file.
            await asyncio.gather(
                self._under_lease(self._metrics.append, record.model_dump(mode="json")),
                self._under_lease(self._spans.append, *spans),
                self._under_lease(self.samples.put, "training", record.step, samples),
                self._under_lease(artifacts.write_json, self._folder.progress(record.step), position),
            )

        self._behind.add(write)

    async def _conclude(
        self, record: StepRecord, status: RLHFJobStatus, draft_steps: list[int], needs: dict[str, int]
    ) -> None:
        self.tracking.log(record)
        # A file that can't be removed now is found again after the next step.
        with contextlib.suppress(artifacts.ArtifactError):
            retention = retention_of(self.spec)
            await self._under_lease(remove_garbage, self._folder, status, retention, draft_steps, needs)

    async def _under_lease(self, write: Callable[..., object], *arguments: object) -> None:
        await asyncio.to_thread(self.lease.fenced, write, *arguments)


def read_status(folder: JobFolder) -> RLHFJobStatus | None:
    """Return the status in a job's folder; None before its first driver.

    Raises:
        ArtifactCorruptError: it is damaged.
    """
    uri = folder.file("status.json")
    return _status_in(uri) if artifacts.exists(uri) else None


def _status_in(uri: str) -> RLHFJobStatus:
    try:
        return RLHFJobStatus.model_validate(artifacts.read_json(uri, most=_MOST_STATUS))
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
        where = ".".join(map(str, fault["loc"])) or "the file"
        raise artifacts.ArtifactCorruptError(
            f"{uri} is damaged or of another format ({where}: {fault['msg']}); restore it, or remove it"
        ) from error


def committed_records(folder: JobFolder, status: RLHFJobStatus) -> list[StepRecord]:
    """Return the records of the steps that the status counts as done; none if their file is not there.

    Raises:
        ArtifactCorruptError: it lacks the end or a line, or a line is damaged.
    """
    uri = folder.file("metrics.jsonl")
    try:
        records = [record for record in read_records(uri, StepRecord) if record.step <= status.step]
    except ValueError as error:
        raise artifacts.ArtifactCorruptError(str(error)) from error
    first = records[0].step if records else status.step
    lacking = sorted({*range(first, status.step + 1)} - {record.step for record in records})
    if status.step and lacking and artifacts.exists(uri):
        raise artifacts.ArtifactCorruptError(
            f"{uri} lacks the record of step {lacking[0]}, which is done: restore it from a copy, or remove it to go on"
            " without the records so far"
        )
    return records


def new_uid() -> str:
    """Return the id of a new incarnation."""
    return uuid.uuid4().hex


def _compressed(batch: BatchReference) -> bytes:
    return zlib.compress(batch.model_dump_json().encode(), level=1)
