"""One driver's hold on a job: its folder, lease, status, position and accounts, opened and committed in one place."""

import asyncio
import contextlib
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.api import STAGES, BatchReference, LearnResult, Purpose, Stage
from rlhfless_operator.job.spec import RLHFJob, RLHFJobSpec
from rlhfless_operator.platforms.base import Platform, Preload, StateChange
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.journal import JsonLines, StepBatch, read_lines
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.records.record import StepRecord, read_records
from rlhfless_operator.records.status import Phase, RLHFJobStatus
from rlhfless_operator.training.capacity import Capacity
from rlhfless_operator.training.cost_model import CostModel
from rlhfless_operator.training.cursor import DataCursor
from rlhfless_operator.training.finished_step import status_after
from rlhfless_operator.training.garbage import remove_garbage
from rlhfless_operator.training.lease import Lease, LeaseLostError
from rlhfless_operator.training.ledger import Ledger
from rlhfless_operator.training.planning import GenerationPlan
from rlhfless_operator.training.prefix_sharing import PrefixSharing
from rlhfless_operator.training.requests import RequestBuilder
from rlhfless_operator.training.tracking import Tracking
from rlhfless_operator.training.write_behind import WriteBehind


def read_status(folder: JobFolder) -> RLHFJobStatus | None:
    """The status in a job's folder; None where no driver has been."""
    uri = folder.file("status.json")
    return RLHFJobStatus.model_validate_json(artifacts.read_bytes(uri)) if artifacts.exists(uri) else None


def committed_records(folder: JobFolder, status: RLHFJobStatus) -> list[StepRecord]:
    """The records of the steps that the status says are done."""
    records = read_records(folder.file("metrics.jsonl"), StepRecord)
    return [record for record in records if record.step <= status.step]


class TrainingRun:
    """A job as one driver has it in hand.

    Args:
        job: the job with resolved paths.
        folder: where its artifacts are.
        lease: this driver's right to the job.
        status: as the last driver left it, with this incarnation's uid.
        make_platform: where the functions run, given what is told of state changes.
        progress: what the terminal view looks at.
        takes_turns: whether the stages' instances can't all have GPUs at once.
    """

    def __init__(
        self,
        job: RLHFJob,
        folder: JobFolder,
        lease: Lease,
        status: RLHFJobStatus,
        make_platform: Callable[[Callable[[StateChange], None]], Platform],
        progress: LiveProgress,
        *,
        takes_turns: bool = False,
    ) -> None:
        self.job = job
        self.spec: RLHFJobSpec = job.spec
        self.folder = folder
        self.lease = lease
        self.status = status
        self.progress = progress
        self.ledger = Ledger()
        self.cost_model = CostModel(job.spec)
        self.platform = make_platform(self._on_state)
        keep_alive = {stage: getattr(job.spec, stage).keep_alive for stage in STAGES}
        self.capacity = Capacity(self.platform, keep_alive, self.cost_model.history, sleeps=takes_turns)
        self._takes_turns = takes_turns
        self.requests = RequestBuilder(job, folder, status.uid, sleeps=takes_turns)
        self.tracking = Tracking({})
        self.on_status: Callable[[RLHFJobStatus], None] = lambda status: None
        """Told of every status once it is written."""
        self.prompts = 0
        self.total_steps = 0
        self.records: list[StepRecord] = []
        self._prompt_tokens: dict[Purpose, list[int]] = {}
        self._prefix_trees: dict[Purpose, dict[str, Any] | None] = {}
        self._ahead: tuple[list[int], GenerationPlan] | None = None
        self._clock_offset = status.seconds - time.monotonic()
        self.committed_at = time.monotonic()
        self._behind = WriteBehind()
        self._published = status
        self._batches: dict[int, bytes] = {}
        """What was learnt from since the newest checkpoint, by step: compressed, since a thousand jobs have it here."""

    # --- opening ---

    def open_data(self, purpose: Purpose) -> int:
        """Take note of a materialised dataset; returns how many prompts it has."""
        index = artifacts.read_json(artifacts.join(self.folder.data(purpose), "index.json"))
        self._prompt_tokens[purpose] = index["lengths"]
        # Datasets that earlier releases prepared say nothing of it.
        self._prefix_trees[purpose] = index.get("prefixes")
        return len(index["lengths"])

    def open_position(self) -> None:
        """Go to where the status says that the job is.

        Raises:
            ValueError: the data has too few prompts for a step.
        """
        self.prompts = self.open_data("training")
        per_step = self.spec.batch.prompts_per_step
        if self.prompts < per_step:
            raise ValueError(
                f"data.source has {self.prompts} usable prompts, fewer than batch.promptsPerStep, {per_step}"
            )
        self.total_steps = self.spec.steps or -(-self.prompts * (self.spec.epochs or 1) // per_step)
        self.cursor = DataCursor(self.prompts, self.spec.seed, shuffle=self.spec.data.shuffle)
        if self.status.step:
            saved = artifacts.read_json(self.folder.progress(self.status.step))
            self.cursor = self.cursor.restored(saved["cursor"])
            self.cost_model.restore(saved)
        metrics = self.folder.file("metrics.jsonl")
        self.records = committed_records(self.folder, self.status)
        self._metrics = JsonLines(metrics, [record.model_dump(mode="json") for record in self.records])
        self._spans = JsonLines(self.folder.file("ledger.jsonl"), read_lines(self.folder.file("ledger.jsonl")))

    # --- what the stages ask ---

    def plan(self, prompts: Sequence[int], samples_per_prompt: int, purpose: Purpose) -> GenerationPlan:
        """The plan for these prompts."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and purpose == "training" and ahead[0] == prompts:
            return ahead[1]
        return self.cost_model.plan(
            prompts,
            samples_per_prompt,
            self._prompt_tokens[purpose],
            known=purpose == "training",
            # A learner that waits for groups would have the GPUs that they need.
            follows=purpose == "training" and self.requests.pieces > 1 and not self._takes_turns,
        )

    def look_ahead(self, step: int) -> None:
        """While step `step` is learnt, plan what is generated next, and have its instances ready in time."""
        evaluation = self.spec.evaluation
        if evaluation is not None and self.evaluation_due(step):
            prompts = list(range(self.open_data("evaluation")))
            plan = self.plan(prompts, evaluation.samples_per_prompt, "evaluation")
        elif step < self.total_steps:
            cursor = self.cursor.restored(self.cursor.state())
            prompts = cursor.draw(self.spec.batch.prompts_per_step)
            plan = self.plan(prompts, self.spec.batch.samples_per_prompt, "training")
            self._ahead = prompts, plan
        else:
            return
        # The next weights are not there yet; into a model that is loaded they are swapped at once.
        preload = Preload(self.spec.model, self.requests.initial, self.requests.engine)
        self.capacity.expect("generation", len(plan.shares), preload, time_price=plan.time_price)

    @property
    def learner_preload(self) -> Preload:
        """What a fresh learner starts from, before it reads a checkpoint."""
        return Preload(self.spec.model, self.requests.initial)

    def prompt_tokens(self, purpose: Purpose) -> Sequence[int]:
        """Tokens of every prompt of a dataset, by row."""
        return self._prompt_tokens[purpose]

    def prefix_sharing(self, plan: GenerationPlan, purpose: Purpose) -> PrefixSharing | None:
        """What the actors of a plan share; None where nothing is, or the job does not want it."""
        tree = self._prefix_trees[purpose]
        if tree is None or not self.spec.generation.share_prefixes or len(plan.shares) < 2:
            return None
        return self.cost_model.share_prefixes(tree, plan.shares, self._prompt_tokens[purpose])

    @property
    def samples_per_step(self) -> int:
        """Samples of a training step."""
        return self.spec.batch.prompts_per_step * self.spec.batch.samples_per_prompt

    def evaluation_due(self, step: int) -> bool:
        """Whether the weights after `step` are evaluated."""
        evaluation = self.spec.evaluation
        if evaluation is None:
            return False
        every = evaluation.every_steps
        return step in (0, self.total_steps) or (every is not None and step % every == 0)

    def checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint is written after `step`."""
        return step == self.total_steps or step % self.spec.checkpoints.every_steps == 0

    # --- committing ---
    # What is written down is what a later driver goes on from. This one goes on at once: a step that was not written
    # down is taken again by whoever comes, and comes to the same bits.

    async def update_status(self, **changes: Any) -> None:
        """Write the status, once all that came before is written; the lease is the fence.

        Raises:
            LeaseLostError: another driver has the job.
        """
        self._status_is(self.status.model_copy(update=changes))
        await self.written()

    def enter(self, stage: Stage) -> None:
        """Say which stage begins."""
        self._status_is(self.status.model_copy(update={"stage": stage}))

    async def written(self) -> None:
        """Wait until everything is written down.

        Raises:
            LeaseLostError: another driver has the job.
        """
        await self._behind.done()

    async def leave(self, phase: Phase, message: str) -> None:
        """Write this driver's last status. Where a write has failed, what came after it is not so.

        Raises:
            LeaseLostError: another driver has the job.
        """
        try:
            await self.written()
        except (LeaseLostError, artifacts.ArtifactError):
            self._behind = WriteBehind()
            self.status = self._published
            self.records = [record for record in self.records if record.step <= self.status.step]
        await self.update_status(phase=phase, message=message)

    def heed_writes(self) -> None:
        """Raise what a write has come to that nobody has waited for yet."""
        self._behind.heed()

    def keep_batch(self, step: int, batch: StepBatch) -> None:
        """Write down a step's batch, of which a later driver learns."""
        self._batches[step] = _compressed(batch.batch)
        content = batch.model_dump(mode="json")
        self._behind.add(lambda: self._under_lease(artifacts.write_json, self.folder.result("batch", step), content))

    def batch_of(self, step: int) -> BatchReference:
        """What an earlier step was learnt from, back to the newest checkpoint."""
        if step not in self._batches:
            recorded = StepBatch.model_validate(artifacts.read_json(self.folder.result("batch", step)))
            self._batches[step] = _compressed(recorded.batch)
        return BatchReference.model_validate_json(zlib.decompress(self._batches[step]))

    async def commit(
        self, step: int, batch: StepBatch | None, learned: LearnResult | None, evaluation: dict[str, float] | None
    ) -> StepRecord:
        """Write down a finished step (or step 0's evaluation). The status comes last: with it the step is done.

        Returns before that is written, but not before the step before is.

        Raises:
            LeaseLostError: another driver has the job.
        """
        await self.written()
        now = time.monotonic()
        seconds, self.committed_at = now - self.committed_at, now
        account = self.ledger.close(now)
        stages = dict(batch.seconds) if batch else {}
        if learned:
            stages["learning"] = learned.metrics.get("learning/beyond_preparation", learned.metrics.get("seconds", 0.0))
        stages["overhead"] = max(0.0, seconds - sum(stages.values()))
        price = self.spec.prices.instance_hour
        metrics = {**(batch.metrics if batch else {}), **(learned.metrics if learned else {})}
        bound = metrics.get("planning/lower_bound_instance_seconds")
        # An evaluation's generation is in the account, too.
        if bound is not None and evaluation is None and (held := account.total("generation")):
            metrics["planning/lower_bound_share"] = bound / held
        record = StepRecord(
            step=step,
            seconds=seconds,
            stages=stages,
            metrics=metrics,
            ledger={**account.by_stage(price)},
            plan=batch.plan.model_dump() if batch else None,
            evaluation=evaluation,
            finished_at=time.time(),
        )
        status = status_after(
            self.status,
            record,
            account,
            learned,
            instance_hour=self.spec.prices.instance_hour,
            keep_best=self.spec.checkpoints.best,
        )
        self.records.append(record)
        self._write_records(step, record)
        self._status_is(status)
        self._behind.add(lambda: self._conclude(record, status))
        if status.checkpoint is not None:
            self._batches = {kept: self._batches[kept] for kept in self._batches if kept > status.checkpoint.step}
        return record

    def _status_is(self, status: RLHFJobStatus) -> None:
        self.status = status
        content = status.model_dump_json(by_alias=True).encode()

        async def publish() -> None:
            await self._under_lease(artifacts.write_bytes, self.folder.file("status.json"), content)
            self._published = status
            self.on_status(status)

        self._behind.add(publish)

    def _write_records(self, step: int, record: StepRecord) -> None:
        offset = self._clock_offset
        spans = [
            {
                "instance": f"{span.instance}@{self.lease.number}",
                "stage": span.stage,
                "state": span.state,
                "start": round(span.start + offset, 6),
                "end": round(span.end + offset, 6),
            }
            for span in self.ledger.take_spans()
        ]
        progress = {"cursor": self.cursor.state(), **self.cost_model.state()}

        async def write() -> None:
            await asyncio.to_thread(self.lease.check)
            # Beside each other, since a store takes its time for each file.
            await asyncio.gather(
                asyncio.to_thread(self._metrics.append, record.model_dump(mode="json")),
                asyncio.to_thread(self._spans.append, *spans),
                asyncio.to_thread(artifacts.write_json, self.folder.progress(step), progress),
            )

        self._behind.add(write)

    async def _conclude(self, record: StepRecord, status: RLHFJobStatus) -> None:
        self.tracking.log(record)
        # What can't be removed now is found again after the next step.
        with contextlib.suppress(artifacts.ArtifactError):
            await asyncio.to_thread(remove_garbage, self.folder, status, self.spec.checkpoints.keep)

    async def _under_lease(self, write: Callable[..., object], *arguments: object) -> None:
        def fenced() -> None:
            self.lease.check()
            write(*arguments)

        await asyncio.to_thread(fenced)

    def _on_state(self, change: StateChange) -> None:
        self.ledger.observe(change)
        self.cost_model.instance_changed(change)


def _compressed(batch: BatchReference) -> bytes:
    return zlib.compress(batch.model_dump_json().encode(), level=1)


def new_uid() -> str:
    """A fresh incarnation's id."""
    return uuid.uuid4().hex
