"""The pieces of a step's batch: whole groups whose gradients are accumulated one piece after the other.

The driver records each piece in the step's piece journal before it is learnt from: one numbered file per piece, created
exclusively. Every learner of the batch, now or later, follows the journal.
"""

from pydantic import Field

from rlhfless_functions.api.messages import Message, SampleTask


class Piece(Message):
    """One piece of a complete batch."""

    samples: int = Field(ge=1)
    """Number of the batch's samples in it; they follow those of the previous piece."""
    parts: list[str]
    """URIs of the prepared parts that hold them. If several hold a sample, the first counts."""


class JournalledPiece(Message):
    """One file of a piece journal."""

    samples: list[SampleTask] = Field(min_length=1)
    """The samples of the piece, in the order of learning."""
    parts: list[str]
    """See `Piece.parts`."""


def piece_uri(folder: str, number: int) -> str:
    """Return the URI of a numbered piece, from 0, in the journal in `folder`."""
    return f"{folder.rstrip('/')}/{number:06d}.json"
