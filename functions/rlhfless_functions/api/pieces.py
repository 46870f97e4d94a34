"""The pieces of a step's batch: whole groups whose gradients are accumulated one piece after the other.

The driver writes each piece down in the step's piece journal before anybody learns from it: one numbered file a piece,
created exclusively. Whoever learns from the batch, and whenever, follows the journal.
"""

from pydantic import Field

from rlhfless_functions.api.messages import Message, SampleTask


class Piece(Message):
    """One piece of a batch that is complete."""

    samples: int = Field(ge=1)
    """How many of the batch's samples are in it; they follow those of the piece before."""
    parts: list[str]
    """URIs of the prepared parts that hold them. Where several hold a sample, the first counts."""


class JournalledPiece(Message):
    """One file of a piece journal."""

    samples: list[SampleTask] = Field(min_length=1)
    """The samples of the piece, in the order of learning."""
    parts: list[str]
    """See `Piece.parts`."""


def piece_uri(folder: str, number: int) -> str:
    """Where the journal in `folder` has its piece of a number, from 0."""
    return f"{folder.rstrip('/')}/{number:06d}.json"
