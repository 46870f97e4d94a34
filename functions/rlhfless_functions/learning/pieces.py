"""The pieces of a step's batch, either a complete one or one in the step's journal. Without torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic, sleep

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, FailureReason, JournalledPiece, Waiting, piece_uri
from rlhfless_functions.data.rollouts import PreparedSample, read_prepared
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskContext, TaskError

LOOK_SECONDS = 0.25
"""Seconds between checks for a piece."""

Key = tuple[int, int]
"""(prompt, index) of a sample."""


class LetGoError(TaskError):
    """The task ended while it had nothing to do. What it has learnt so far is intact, and it can be resumed."""

    def __init__(self, step: int, waited: str = "for a piece", reason: FailureReason = "drained") -> None:
        super().__init__(reason, f"step {step} was interrupted while it waited {waited}; retry it", retryable=True)


@dataclass
class FollowedJournal:
    """A step's piece journal, for one reader.

    Args:
        reference: names or counts the samples that the pieces hold together.
        folder: folder of the journal.
        context: says whether to stop; the reader reports to it when it begins and ends waiting.
        agree: returns the first reader's finding to all readers that must continue together.
        waits: whether to wait for a piece that is not there yet.
        heed: called while it waits; it raises an error to stop waiting.
    """

    reference: BatchReference
    folder: str
    context: TaskContext
    agree: Callable[[str], str] = lambda found: found
    waits: bool = True
    heed: Callable[[], None] = lambda: None
    waited_seconds: float = 0.0
    """Seconds without work so far."""

    def pieces(self, done: int = 0, samples: int = 0) -> Iterator[JournalledPiece]:
        """Yield each piece once it is written, until they hold the whole batch.

        Args:
            done: number of pieces to skip.
            samples: number of samples in those.

        Raises:
            ArtifactError: a piece can't be read.
            TaskError: the task was told to stop; a `LetGoError` after a cut, and for a missing piece where none is
                waited for.
        """
        left, number = self.reference.size - samples, done
        while left:
            uri = piece_uri(self.folder, number)
            self._await(uri, number)
            with store_errors():
                piece = JournalledPiece.model_validate(artifacts.read_json(uri))
            left -= len(piece.samples)
            number += 1
            yield piece

    def _await(self, uri: str, done: int) -> None:
        waiting = False
        while (found := self.agree(self._look(uri))) == "nothing":
            if not waiting:
                waiting = True
                self.context.emit(Waiting(waiting=True, pieces=done))
            if not self.waits:
                raise LetGoError(self.reference.step, reason="awaits_pieces")
            self.heed()
            began = monotonic()
            sleep(LOOK_SECONDS)
            self.waited_seconds += monotonic() - began
        if found == "cut":
            raise LetGoError(self.reference.step)
        if found == "drain":
            check(self.context, self.reference.step)
            raise TaskError("drained", "another rank was told to stop; take the step again", retryable=True)
        if waiting:
            self.context.emit(Waiting(waiting=False, pieces=done))

    def _look(self, uri: str) -> str:
        with store_errors():
            return "piece" if artifacts.exists(uri) else self.context.stop_reason or "nothing"


@dataclass
class Parts:
    """Prepared parts. Each is read only once, even if several pieces have samples in it."""

    _found: dict[str, dict[Key, PreparedSample]] = field(default_factory=dict)

    def take(self, piece: JournalledPiece, step: int) -> list[PreparedSample]:
        """Return the prepared samples of a piece, in its order.

        Raises:
            ArtifactError: a part can't be read.
            TaskError: `data_invalid`: a sample is in none of the parts.
        """
        named = [piece.parts[number] for number in piece.part_of]
        with store_errors():
            for part in named or piece.parts:
                if part not in self._found:
                    self._found[part] = read_prepared([part])
        taken = []
        for place, sample in enumerate(piece.samples):
            key = sample.prompt, sample.index
            parts = [named[place]] if named else piece.parts
            part = next((part for part in parts if key in self._found[part]), None)
            if part is None:
                raise TaskError(
                    "data_invalid",
                    f"step {step}: (prompt, index) {key} is in none of its piece's parts; prepare the step again",
                )
            taken.append(self._found[part].pop(key))
        return taken


def pieces_of(reference: BatchReference) -> Iterator[JournalledPiece]:
    """Yield the pieces of a complete batch.

    Raises:
        TaskError: `bad_request`: they do not add up to the batch.
    """
    ends = list(accumulate(piece.samples for piece in reference.pieces))
    if ends[-1] != len(reference.samples):
        raise TaskError(
            "bad_request",
            f"batch.pieces: they have {ends[-1]} samples, but the batch of step {reference.step} has"
            f" {len(reference.samples)}; name every sample in one piece",
        )
    for piece, end in zip(reference.pieces, ends, strict=True):
        place = slice(end - piece.samples, end)
        yield JournalledPiece(
            samples=reference.samples[place],
            # The numbers of parts are those of the batch.
            parts=reference.parts if reference.part_of else piece.parts,
            part_of=reference.part_of[place],
            factors=reference.factors[place],
        )


def check(context: TaskContext, step: int) -> None:
    """Raise an error if the task is told to stop.

    Raises:
        TaskError: `drained`.
    """
    if context.stop_reason is not None:
        raise TaskError(
            "drained", f"step {step} was interrupted by a {context.stop_reason}; take it again", retryable=True
        )
