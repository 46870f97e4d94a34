"""The learning stage: makes the next weights version from a batch.

An instance's state in memory is a cache. If a learner is new, or at a different version from the request's base, it
loads the newest checkpoint and repeats the steps since then, from batches in the store. With the same number of threads
this gives the same weights, bit for bit.

A learner may publish a version beside its next step: `version_publisher.py`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from rlhfless_functions.api import (
    ExportRequest,
    ExportResult,
    JournalledPiece,
    LearnRequest,
    LearnResult,
    Learnt,
    SaveRequest,
    SaveResult,
    TakeUpRequest,
    TakeUpResult,
    WeightsReference,
)
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.learning.batch import TrainingBatch, read_batch
from rlhfless_functions.learning.checkpoints import restore_checkpoint, save_checkpoint
from rlhfless_functions.learning.meeting import Held, ends_where_stuck, meet
from rlhfless_functions.learning.offload import move
from rlhfless_functions.learning.outputs import export, publish, published_bytes, result_of, version_of
from rlhfless_functions.learning.pieces import FollowedJournal, LetGoError, Parts, check, pieces_of
from rlhfless_functions.learning.request_checks import check_pieces, check_steps, processes
from rlhfless_functions.learning.state import TrainingState, arithmetic_of, initial_state, load_master_weights
from rlhfless_functions.learning.step import StepInPieces, train_step
from rlhfless_functions.learning.step_metrics import step_metrics
from rlhfless_functions.learning.team import Team
from rlhfless_functions.learning.version_publisher import VersionPublisher
from rlhfless_functions.runtime.device_memory import give_back
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import ModelSettings

logger = logging.getLogger(__name__)


class Learner:
    """One instance's learner: runs one task at a time.

    Args:
        ranks: the ranks of a process that follows another's learner; an instance's own learner starts those of a
            request.
        host: address that the instance listens on, at which other instances of its gang reach it.
    """

    def __init__(self, ranks: Ranks | None = None, *, host: str = "127.0.0.1") -> None:
        self._follows = ranks is not None
        self._ranks = ranks or Ranks()
        self._host = host
        self._team: Team | None = None
        self._state: TrainingState | None = None
        self._begun: StepInPieces | None = None
        """A step that was interrupted while it waited for a piece, instead of `_state`."""
        self._publisher = VersionPublisher()
        self._loaded: tuple[ModelSettings, WeightsReference, PreTrainedModel | PeftModel] | None = None

    def preload(self, model: ModelSettings, weights: WeightsReference) -> None:
        """Load the policy into memory for a first request that starts from the same weights.

        Raises:
            TaskError: it can't be loaded.
        """
        self._loaded = model, weights, load_master_weights(model, weights)

    def run(
        self, request: LearnRequest | TakeUpRequest | SaveRequest | ExportRequest, context: TaskContext
    ) -> LearnResult | TakeUpResult | SaveResult | ExportResult:
        """Take a training step and publish its results, load or save the state, or export a weights version.

        A step that is cut after `Learnt` is published nevertheless.

        Raises:
            TaskError: the task failed. Only complete versions are published. `non_finite_loss` names the step;
                `drained` means that the context said stop before the step was taken.
        """
        try:
            if isinstance(request, ExportRequest):
                context.awake()
                return export(request)
            if isinstance(request, SaveRequest):
                return self._save(request)
            # Check before instances meet: one that refuses later would leave the others waiting.
            taken = request.step if isinstance(request, TakeUpRequest) else request
            step = check_steps(taken)
            with ends_where_stuck(taken.gang, context):
                self._call_ranks(taken, request, context)
                loads = isinstance(request, TakeUpRequest)
                result = self._take_up_ahead(taken, context) if loads else self._learn(taken, step, context)
                self._ranks.await_own()
                return result
        except torch.OutOfMemoryError as error:
            self._publisher.settle(lambda: check(context, request.key.step))
            self.close()
            raise TaskError(
                "out_of_memory",
                f"step {request.key.step}: {error}. Lower batch.microbatchTokens or learning.logitsChunkTokens,"
                " enable learning.gradientCheckpointing or optimizer.offload, or train an adapter (model.lora)",
            ) from error
        except LetGoError:
            if self._ranks.instances > 1:
                # The next attempt may have other instances.
                self.close()
            raise
        except TaskError:
            self._publisher.settle(lambda: check(context, request.key.step))
            self.close()
            raise
        except Exception as error:
            told = self._failure(request, error)
            self.close()
            if told is None:
                raise
            raise told from error

    def sleep(self) -> None:
        """Release the devices' memory: every rank moves its state to the host's memory, and back for the next step. On
        a CPU it is there already.

        Raises:
            Exception: the state in memory is unusable now.
        """
        if self._ranks.instances > 1:
            # Tell the others first: otherwise this rank would wait here for them.
            self.close()
        (state, self._state), (begun, self._begun) = (self._state, None), (self._begun, None)
        try:
            if self._team is not None:
                self._team.sleep()
            if state is not None:
                move(state, torch.device("cpu"))
            if begun is not None:
                begun.move(torch.device("cpu"))
            give_back()
            self._ranks.all("asleep")
        except BaseException:
            self.close()
            raise
        self._state, self._begun = state, begun

    def finish(self) -> None:
        """Wait until nothing is published any more."""
        self._publisher.keep(None, lambda: None)

    def close(self) -> None:
        """End the other learning processes, if there are any. Their state is lost."""
        if self._team is not None:
            self._team.end()
            self._team, self._ranks, self._state, self._begun = None, Ranks(), None, None

    def _save(self, request: SaveRequest) -> SaveResult:
        """Write the state in memory as a checkpoint. It stays in memory."""
        started, state = time.monotonic(), self._state
        if state is None or (state.job_uid, state.version) != (request.key.job_uid, request.version):
            raise TaskError("bad_request", f"version: this learner does not hold version {request.version}")
        if self._ranks.instances > 1:
            raise TaskError("bad_request", "version: instances that learn together save with a step only")
        if self._team is not None and not self._follows:
            self._team.tell(request.model_dump_json())
        save_checkpoint(request.checkpoint, state)
        return SaveResult(checkpoint=request.checkpoint, seconds=time.monotonic() - started)

    def _call_ranks(self, request: LearnRequest, told: LearnRequest | TakeUpRequest, context: TaskContext) -> None:
        """Start the processes that a step needs, here and in other instances, and send them what they are told."""
        if self._follows:
            return
        size = processes(request)
        alone = self._ranks.instances == 1
        if request.gang is None:
            if not alone or size != self._ranks.size:
                self.close()
                self._state = self._begun = None
                if size > 1:
                    self._team = Team(size)
                    self._ranks = self._team.join()
        else:
            if alone or self._team is None or self._team.size != size:
                self.close()
                self._state = self._begun = None
                self._team = Team(size)
            place = meet(request.gang, request.key, size, self._held(), self._host, context)
            if not place.kept:
                if self._team.seat is not None:
                    # Each group has processes of its own.
                    self.close()
                    self._team = Team(size)
                self._ranks = self._team.join(place.seat, place.store)
        if self._team is not None:
            self._team.tell(told.model_dump_json())

    def _held(self) -> Held | None:
        """Return this instance's part of a group's state."""
        seat, state = self._team.seat if self._team is not None else None, self._state
        if seat is None or state is None:
            return None
        return Held(seat.group, seat.rank // (seat.of_instance or 1), f"{state.job_uid}/{state.version}")

    def _failure(
        self, request: LearnRequest | TakeUpRequest | SaveRequest | ExportRequest, error: Exception
    ) -> TaskError | None:
        """Return the error of another rank that explains an error here; None if no rank has ended."""
        told = self._team.failure() if self._team is not None else None
        if told is None and self._ranks.instances > 1 and isinstance(error, RuntimeError):
            told = TaskError(
                "internal",
                f"step {request.key.step}: one of {self._ranks.instances} learning instances is gone ({error});"
                " take the step again",
                retryable=True,
            )
        return told

    def _take_up_ahead(self, request: LearnRequest, context: TaskContext) -> TakeUpResult:
        """Load the state that a step starts from. It stays in memory."""
        request = request.model_copy(update={"algorithm": request.algorithm.resolved()})
        seconds: dict[str, float] = {}
        context.awake()
        self._state, self._begun = self._take_up(request, context, seconds, lambda: check(context, request.batch.step))
        return TakeUpResult(
            load_seconds=seconds.get("seconds/load", 0.0), replay_seconds=seconds.get("seconds/replay", 0.0)
        )

    def _learn(self, request: LearnRequest, step: int, context: TaskContext) -> LearnResult:
        started = time.monotonic()
        request = request.model_copy(update={"algorithm": request.algorithm.resolved()})
        check_pieces(request)

        def go_on() -> None:
            check(context, step)
            self._publisher.heed()

        self._publisher.keep(request.unpublished, lambda: check(context, step))
        journal: FollowedJournal | None = None
        batch: TrainingBatch | None = None
        if request.following is not None:
            journal = FollowedJournal(
                request.batch,
                request.following,
                context,
                lambda found: self._ranks.all(found)[0],
                request.waits,
                self._publisher.heed,
            )
        elif not request.batch.pieces:
            with store_errors():
                batch = TrainingBatch(read_batch(request.batch), request.algorithm, step, request.batch.factors)
        seconds: dict[str, float] = {}
        # After any error from here on, the state in memory is dropped: it may be half a step further.
        state, begun = self._take_up(request, context, seconds, go_on)
        context.awake()
        if request.unpublished is not None:
            self._publisher.publish_before(request.unpublished, request.model, state, context)
        parts = {name.replace("/", "_"): round(spent, 4) for name, spent in seconds.items()}
        logger.info("learning begins", extra={"fields": {"step": step, **arithmetic_of(request, state), **parts}})
        training = time.monotonic()
        if batch is not None:
            report = train_step(state, batch, request, step, go_on)
        else:
            begun = begun or StepInPieces(state, request, step)
            self._add_all_pieces(begun, request, journal, go_on)
            report, batch = begun.end(), TrainingBatch(begun.samples, request.algorithm, step, begun.factors)
        earlier = begun.seconds if begun is not None else 0.0
        seconds["seconds/train"] = time.monotonic() - training + earlier
        if journal is not None:
            seconds["seconds/wait"] = journal.waited_seconds
            seconds["seconds/train"] -= journal.waited_seconds
        metrics = step_metrics(report, batch, request.algorithm)
        metrics["learning/threads"] = float(torch.get_num_threads())
        held_from = time.monotonic()
        self._publisher.await_earlier(go_on)
        if self._publisher.can_publish_beside(request, state):
            self._publisher.begin(version_of(request), request.model, state)
            self._state = state
            seconds["seconds/publish_wait"] = time.monotonic() - held_from
            seconds["seconds"] = time.monotonic() - started + earlier
            context.emit(Learnt(result=result_of(request, metrics | seconds).model_dump(mode="json")))
            return result_of(request, metrics | seconds | self._published(step, context))
        if request.unpublished is not None:
            seconds["seconds/publish_wait"] = time.monotonic() - held_from
        with _timed(seconds, "seconds/publish"):
            publish(request, state)
        self._state = state
        seconds["seconds"] = time.monotonic() - started + earlier
        result = result_of(request, metrics | published_bytes(version_of(request), request.model, state) | seconds)
        # All instances return the same result.
        return result if request.gang is None else self._ranks.all(result)[0]

    def _add_all_pieces(
        self, begun: StepInPieces, request: LearnRequest, journal: FollowedJournal | None, go_on: Callable[[], None]
    ) -> None:
        """Learn from the pieces of a step, as they come if there is a journal. A step that is let go is kept."""
        started, step = time.monotonic(), request.batch.step
        pieces = pieces_of(request.batch) if journal is None else journal.pieces(begun.pieces, len(begun.samples))
        try:
            _add_pieces(begun, pieces, step, go_on)
        except LetGoError:
            assert journal is not None
            begun.seconds += time.monotonic() - started - journal.waited_seconds
            self._begun = begun
            raise

    def _published(self, step: int, context: TaskContext) -> dict[str, float]:
        """Return the metrics of a step's publication once it has ended."""

        def let_go() -> None:
            # A drained instance ends once it has published.
            if context.stop_reason == "cut":
                raise LetGoError(step, "for its publication")

        try:
            return self._publisher.await_newest(let_go)
        except LetGoError:
            raise
        except BaseException:
            self._state = None
            raise

    def _take_up(
        self, request: LearnRequest, context: TaskContext, seconds: dict[str, float], go_on: Callable[[], None]
    ) -> tuple[TrainingState, StepInPieces | None]:
        """Return the state that the step starts from, on its device, and the step itself if it was interrupted
        before."""
        (state, self._state), (begun, self._begun) = (self._state, None), (self._begun, None)
        if begun is not None and _same_step(begun.request, request):
            if begun.state.device != self._ranks.device:
                with _timed(seconds, "seconds/wake"):
                    begun.move(self._ranks.device)
            return begun.state, begun
        if state is None or (state.job_uid, state.version) != (request.key.job_uid, request.base.version):
            # The state from before the sleep is unusable. Loading and repeating steps counts as work.
            context.awake()
            # It may refer to the models that are to be replaced.
            self._publisher.keep(None, lambda: check(context, request.batch.step))
            state = self._rebuild(request, go_on, seconds)
        elif state.device != self._ranks.device:
            with _timed(seconds, "seconds/wake"):
                move(state, self._ranks.device)
        state.use(request)
        return state, None

    def _rebuild(self, request: LearnRequest, go_on: Callable[[], None], seconds: dict[str, float]) -> TrainingState:
        loaded, self._loaded = self._loaded, None
        with _timed(seconds, "seconds/load"):
            fits = loaded is not None and loaded[:2] == (request.model, request.initial)
            state = initial_state(request, loaded[2] if loaded is not None and fits else None, self._ranks)
            if request.checkpoint is not None:
                restore_checkpoint(request.checkpoint, state)
        with _timed(seconds, "seconds/replay"):
            for reference in request.replay:
                step = reference.step
                # With the settings that the step was first taken with.
                then = request.model_copy(update=dict(request.replay_settings.get(step, ())))
                logger.info("replaying step %d", step)
                state.use(then)
                if reference.pieces:
                    again = StepInPieces(state, then, step)
                    _add_pieces(again, pieces_of(reference), step, go_on)
                    again.end()
                    continue
                with store_errors():
                    batch = TrainingBatch(read_batch(reference), request.algorithm, step, reference.factors)
                train_step(state, batch, then, step, go_on)
        return state


def _add_pieces(taken: StepInPieces, pieces: Iterable[JournalledPiece], step: int, go_on: Callable[[], None]) -> None:
    parts = Parts()
    for piece in pieces:
        taken.add(parts.take(piece, step), go_on, piece.factors)


def _same_step(begun: LearnRequest, request: LearnRequest) -> bool:
    """Return whether a request is another attempt at the same step, perhaps from another driver."""
    varying = {"key", "result", "heartbeat_seconds", "batch", "waits", "publish_beside", "unpublished"}
    varying |= {"checkpoint", "checkpoint_step", "replay", "replay_settings"}
    same = begun.model_dump(exclude=varying) == request.model_dump(exclude=varying)
    return same and begun.key.job_uid == request.key.job_uid and begun.batch.step == request.batch.step


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started
