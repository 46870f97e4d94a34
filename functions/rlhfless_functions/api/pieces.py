"""The pieces of a step's batch: whole groups whose gradients are accumulated one piece after the other.

The driver records each piece in the step's piece journal before it is learnt from: one numbered file per piece, created
exclusively. Every learner of the batch, now or later, follows the journal.
"""

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

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
    part_of: list[int] = Field(default=[])
    """See `BatchReference.part_of`."""
    factors: list[float] = Field(default=[])
    """See `BatchReference.factors`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_numbers(len(self.samples), self.parts, self.part_of, self.factors)
        return self


def check_numbers(samples: int, parts: Sequence[str], part_of: Sequence[int], factors: Sequence[float]) -> None:
    """Return if samples have as many parts and factors as there are samples, or none.

    Raises:
        ValueError: they do not.
    """
    for name, numbers in (("part_of", part_of), ("factors", factors)):
        if numbers and len(numbers) != samples:
            raise ValueError(f"{name}: {len(numbers)} numbers for {samples} samples")
    if any(not 0 <= number < len(parts) for number in part_of):
        raise ValueError(f"part_of: numbers of parts are 0 to {len(parts) - 1}")


def piece_uri(folder: str, number: int) -> str:
    """Return the URI of a numbered piece, from 0, in the journal in `folder`."""
    return f"{folder.rstrip('/')}/{number:06d}.json"
