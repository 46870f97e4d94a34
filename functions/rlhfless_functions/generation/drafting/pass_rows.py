"""The rows of a decode pass with drafts, and the tokens of it that count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlhfless_functions.generation.drafting.drafter import Drafts
from rlhfless_functions.generation.drafting.index import Integers


@dataclass(frozen=True)
class PassRows:
    """The rows of a pass: one for each slot in use, then one for each draft, then padding that repeats the last."""

    used: int
    """Number of leading slots that get a row. Some of them may be free."""
    slots: Integers
    """[rows] slot of each row."""
    offsets: Integers
    """[rows] 0 for a sequence's newest token, 1 for its first draft, and so on."""
    runs: list[tuple[int, int, int]]
    """(slot, first row, last row + 1) of the adjacent draft rows of each slot. The padding belongs to the last."""

    @classmethod
    def of(cls, used: int, drafts: Drafts, padded: Callable[[int], int]) -> Self:
        """Lay out a pass.

        Args:
            used: see `used`.
            drafts: at least one.
            padded: returns the rows that a pass computes, given those that it needs.
        """
        spare = (0, padded(used + len(drafts.tokens)) - used - len(drafts.tokens))
        slots = np.pad(np.concatenate([np.arange(used), drafts.slots]), spare, mode="edge")
        offsets = np.pad(np.concatenate([np.zeros(used, dtype=np.int64), drafts.offsets]), spare, mode="edge")
        firsts = used + np.flatnonzero(np.diff(slots[used:], prepend=-1))
        lasts = [*firsts[1:].tolist(), len(slots)]
        runs = list(zip(slots[firsts].tolist(), firsts.tolist(), lasts, strict=True))
        return cls(used, slots, offsets, runs)

    def drafted(self, tokens: Integers) -> Integers:
        """Return the input tokens of the rows after the slots' own: the drafts, and the padding."""
        return np.pad(tokens, (0, len(self.slots) - self.used - len(tokens)), mode="edge")

    def kept(self, active: Integers, drafts: Drafts, drawn: Integers, ends: NDArray[np.bool_]) -> Integers:
        """Return how many tokens each active slot gets: one, and one more for each right draft, up to a token that ends
        it.

        Args:
            active: slots with a sequence.
            drafts: the tried drafts.
            drawn: [rows] drawn token of each row.
            ends: [rows] whether that token ends the sequence.
        """
        rows = self.used + np.arange(len(drafts.tokens))
        before = np.where(drafts.offsets == 1, drafts.slots, rows - 1)
        right = (drawn[before] == drafts.tokens) & ~ends[before]
        slots, firsts, tried = np.unique(drafts.slots, return_index=True, return_counts=True)
        first_wrong = np.minimum.reduceat(np.where(right, len(self.slots), drafts.offsets - 1), firsts)
        counts = np.ones(len(active), dtype=np.int64)
        counts[np.searchsorted(active, slots)] += np.minimum(first_wrong, tried)
        return counts

    def rows_of(self, active: Integers, counts: Integers, drafts: Drafts) -> Integers:
        """Return the rows whose tokens count; those of a slot are adjacent and in order."""
        kept = np.zeros(self.used, dtype=np.int64)
        kept[active] = counts
        rows = np.concatenate([active, self.used + np.flatnonzero(drafts.offsets < kept[drafts.slots])])
        return rows[np.lexsort((self.offsets[rows], self.slots[rows]))]
