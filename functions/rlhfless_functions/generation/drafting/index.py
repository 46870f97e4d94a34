"""What followed the longest match of the newest tokens in sequences that are known: drafts without a model.

Tables of hashes say where an n-gram was seen last: in sequences of the same prompt, and in any. A place from a table
counts for as many tokens as really match, so a table may be small, may forget, and may name places that have been
written over since. Everything is numpy over many sequences at once.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless_functions.data.draft_history import PROMPT_END, KnownResponse

Integers = NDArray[np.int64]

SEPARATOR = -1
"""Between sequences. No token has this number, so neither a match nor a draft leaves its sequence."""
MATCH = PROMPT_END
"""Longest match that is looked for, in tokens."""
LEVELS: tuple[tuple[bool, int], ...] = ((True, 12), (True, 4), (False, 8), (False, 3))
"""The tables: whether only sequences of the same prompt count, and n. Chosen on the quickstart's responses, with those
of earlier visits known: 6.3 tokens a pass, against 4.3 with n = 8 alone and 6.5 with six tables."""

_ADDED_TOKENS = 1 << 16
"""Tokens whose n-grams are entered at a time, so that temporary arrays stay small."""
_WEIGHTS = np.random.default_rng(0).integers(0, 2**63, MATCH, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SALT, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_LENGTHS = np.array([n for _, n in LEVELS]) - 1
_OWN = np.array([own for own, _ in LEVELS], dtype=np.uint64)[:, None]
_LEVEL = np.arange(len(LEVELS))[:, None]
_BACK = np.arange(1, MATCH + 1)


class DraftIndex:
    """Known responses and their n-grams, and room for sequences that still grow.

    Args:
        capacity: tokens of known responses that are kept; later ones then overwrite the oldest.
        rows: sequences that grow at a time.
        row_tokens: longest of them, prompt and response together.
    """

    def __init__(self, capacity: int, rows: int = 0, row_tokens: int = 0) -> None:
        self._known_end = MATCH + max(capacity, 4 * MATCH)
        self._row_tokens = row_tokens + MATCH + 1
        # Zeros take no memory before they are written.
        self.tokens: NDArray[np.int32] = np.zeros(self._known_end + rows * self._row_tokens + MATCH, dtype=np.int32)
        self.tokens[:MATCH] = SEPARATOR
        self.starts: Integers = self._known_end + MATCH + np.arange(rows) * self._row_tokens
        """Where the sequence of each row begins in `tokens`."""
        for back in range(1, MATCH + 1):
            self.tokens[self.starts - back] = SEPARATOR
        bits = max(8, (len(self.tokens) * 3 // 2).bit_length())
        self._shift = np.uint64(64 - bits)
        self._tables = np.zeros((len(LEVELS), 1 << bits), dtype=np.int32)
        self._end = MATCH

    @property
    def bytes(self) -> int:
        """Memory that it takes once all of it has been written."""
        return self.tokens.nbytes + self._tables.nbytes

    def add(self, responses: Sequence[KnownResponse]) -> None:
        """Take in responses; of equal n-grams, the last one's place is remembered."""
        places: list[Integers] = []
        prompts: list[int] = []
        pending = 0
        for response in responses:
            before = response.prompt_end[-MATCH:]
            room = self._known_end - MATCH - len(before) - 1
            sequence = np.array([*before, *response.tokens[:room], SEPARATOR], dtype=np.int32)
            if self._end + len(sequence) > self._known_end:
                self._enter_all(places, prompts)
                places, prompts, pending = [], [], 0
                self._end = MATCH
            start = self._end
            self._end += len(sequence)
            self.tokens[start : self._end] = sequence
            places.append(np.arange(start + max(1, len(before)), self._end - 1))
            prompts.append(response.prompt)
            pending += len(sequence)
            if pending > _ADDED_TOKENS:
                self._enter_all(places, prompts)
                places, prompts, pending = [], [], 0
        self._enter_all(places, prompts)

    def _enter_all(self, places: list[Integers], prompts: list[int]) -> None:
        if places:
            self.enter(np.concatenate(places), np.repeat(np.array(prompts), [len(each) for each in places]))

    def enter(self, places: Integers, prompts: Integers) -> None:
        """Remember that what is before each place is followed by the token there."""
        # Table by table: only then does the last of equal n-grams count.
        for table, slots in zip(self._tables, self._slots(self._before(places), prompts), strict=True):
            table[slots] = places

    def look_up(self, ends: Integers, prompts: Integers) -> tuple[Integers, Integers]:
        """Find the longest match of the tokens before each of `ends`.

        Args:
            ends: places behind the newest token of each sequence.
            prompts: row of the prompt of each.

        Returns:
            Where the token is that followed the match, and how many tokens match: at most `MATCH`, 0 where none do.
        """
        known = self._before(ends)
        candidates = self._tables[_LEVEL, self._slots(known, prompts)]
        equal = (self.tokens[candidates[..., None] - _BACK] == known) & (known != SEPARATOR)
        # The first token that differs ends the match; a sentinel for those in which none does.
        unequal = np.concatenate([~equal, np.ones((*equal.shape[:2], 1), dtype=bool)], axis=2)
        lengths = unequal.argmax(axis=2)
        lengths[self.tokens[candidates] == SEPARATOR] = 0
        best = lengths.argmax(axis=0)
        column = np.arange(len(ends))
        return candidates[best, column].astype(np.int64), lengths[best, column]

    def _before(self, places: Integers) -> NDArray[np.int32]:
        """[places, MATCH] tokens before each place, the nearest first."""
        return self.tokens[places[:, None] - _BACK]

    def _slots(self, before: NDArray[np.int32], prompts: Integers) -> NDArray[np.int64]:
        """[levels, places] where the tables keep what these tokens were followed by."""
        mixed = np.cumsum(before.astype(np.uint64) * _WEIGHTS, axis=1, dtype=np.uint64)
        hashed = mixed[:, _LENGTHS].T + (prompts.astype(np.uint64) + np.uint64(1)) * _SALT * _OWN
        return (((hashed ^ (hashed >> np.uint64(31))) * _MIX) >> self._shift).astype(np.int64)
