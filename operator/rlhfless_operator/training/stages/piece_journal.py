"""The composition of the pieces that a step's batch is learnt from in: written down before anybody learns from them.

A piece is a numbered file that is created exclusively. A fresh learner follows what is there, and so does a fresh
driver, which goes on from it. Two drivers, of which one does not know yet that it has lost the job, make one sequence.
"""

from collections.abc import Sequence
from itertools import pairwise

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, JournalledPiece, Piece, SampleTask, piece_uri

_PIECES = 6
"""Of a fixed order: more wait less for the last groups of each, fewer pad less and have larger passes."""

Key = tuple[int, int]


class PieceJournal:
    """One step's pieces, those of earlier drivers included. Its calls wait for the store.

    Args:
        folder: of the journal.
        order: the samples of each piece, where that is known beforehand; without it each chunk is a piece, in the order
            of their arrival.
    """

    def __init__(self, folder: str, order: Sequence[Sequence[SampleTask]] | None = None) -> None:
        self.folder = folder
        self.pieces: list[JournalledPiece] = []
        """All that is written, as far as this driver knows."""
        self.order = order
        """The samples of each piece, where that is known beforehand."""
        self._parts: dict[Key, str] = {}
        """The prepared part of each sample."""
        for number in range(len(artifacts.list_files(folder))):
            self.pieces.append(self._read(number))

    def prepared(self, samples: Sequence[SampleTask], part: str) -> None:
        """Write down what can be learnt from now that these samples are prepared.

        Args:
            samples: whole groups; those that a piece holds already are passed over.
            part: URI of the prepared part that has them.

        Raises:
            ArtifactError: the store does not answer.
        """
        if self.order is None:
            self._append(samples, [part])
            return
        for sample in samples:
            self._parts.setdefault(_key(sample), part)
        while len(self.pieces) < len(self.order):
            piece = self.order[len(self.pieces)]
            if any(_key(sample) not in self._parts for sample in piece):
                return
            self._append(piece, list(dict.fromkeys(self._parts[_key(sample)] for sample in piece)))

    def batch(self, step: int) -> BatchReference:
        """The batch in the journal's order, once all of it is prepared."""
        return BatchReference(
            step=step,
            parts=list(dict.fromkeys(part for piece in self.pieces for part in piece.parts)),
            samples=[sample for piece in self.pieces for sample in piece.samples],
            pieces=[Piece(samples=len(piece.samples), parts=piece.parts) for piece in self.pieces],
        )

    def _append(self, samples: Sequence[SampleTask], parts: list[str]) -> None:
        held = {_key(sample) for piece in self.pieces for sample in piece.samples}
        while left := [sample for sample in samples if _key(sample) not in held]:
            piece = JournalledPiece(samples=left, parts=parts)
            number = len(self.pieces)
            if not artifacts.create_exclusive(piece_uri(self.folder, number), piece.model_dump_json().encode()):
                # Another driver was first, and what it has written may be learnt from already.
                piece = self._read(number)
            self.pieces.append(piece)
            held.update(map(_key, piece.samples))

    def _read(self, number: int) -> JournalledPiece:
        return JournalledPiece.model_validate(artifacts.read_json(piece_uri(self.folder, number)))


def cut(samples: Sequence[SampleTask], pieces: int = _PIECES) -> list[list[SampleTask]]:
    """The samples of each piece of a fixed order: about as many groups in each, none of them cut; fewer pieces where
    there are too few.

    It depends on the arguments alone: every driver cuts the batch alike, at any time.
    """
    groups: dict[int, list[SampleTask]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    ordered = list(groups.values())
    bounds = [len(ordered) * number // pieces for number in range(pieces + 1)]
    runs = [ordered[start:end] for start, end in pairwise(bounds) if end > start]
    return [[sample for group in run for sample in group] for run in runs]


def _key(sample: SampleTask) -> Key:
    return sample.prompt, sample.index
