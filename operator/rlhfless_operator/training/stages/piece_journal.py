"""The pieces that a step's batch is learnt from, written down before a learner uses them.

A piece is a numbered file that is created exclusively. A fresh learner follows the files that are there. A fresh driver
does, too, and adds to them. Two drivers, one of which does not know yet that it has lost the job, write one sequence.
"""

from collections.abc import Sequence

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, JournalledPiece, Piece, SampleTask, piece_uri
from rlhfless_operator.training.actors.heard import key_of


class PieceJournal:
    """The pieces of one step, those of earlier drivers included. Its calls wait for the store.

    Args:
        folder: of the journal.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.pieces: list[JournalledPiece] = []
        """Pieces that are written, as far as this driver knows."""
        for number in range(len(artifacts.list_files(folder))):
            self.pieces.append(self._read(number))

    def prepared(self, samples: Sequence[SampleTask], part: str) -> None:
        """Write a prepared chunk down as the next piece.

        Args:
            samples: whole groups; those that a piece holds already are passed over.
            part: URI of the prepared part with the groups.

        Raises:
            ArtifactError: the store does not answer.
        """
        held = {key_of(sample) for piece in self.pieces for sample in piece.samples}
        while left := [sample for sample in samples if key_of(sample) not in held]:
            piece = JournalledPiece(samples=left, parts=[part])
            number = len(self.pieces)
            if not artifacts.create_json(piece_uri(self.folder, number), piece.model_dump(mode="json")):
                # Another driver was first, and a learner may have learnt from its piece already.
                piece = self._read(number)
            self.pieces.append(piece)
            held.update(map(key_of, piece.samples))

    def batch(self, step: int) -> BatchReference:
        """Return the batch in the journal's order, once all of it is prepared."""
        return BatchReference(
            step=step,
            parts=list(dict.fromkeys(part for piece in self.pieces for part in piece.parts)),
            samples=[sample for piece in self.pieces for sample in piece.samples],
            pieces=[Piece(samples=len(piece.samples), parts=piece.parts) for piece in self.pieces],
        )

    def _read(self, number: int) -> JournalledPiece:
        return JournalledPiece.model_validate(artifacts.read_json(piece_uri(self.folder, number)))
