"""The index of known sequences: it finds the longest match of the newest tokens, and the tokens that followed it. They
are drafts without a model.

Hash tables say where an n-gram was seen last, in sequences of the same prompt and in any. The number of tokens that
really match decides how much a place from a table counts. So a table may be small, may forget, and may name places that
have been overwritten since. All of it is numpy over many sequences at once.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless_functions.data.draft_history import PROMPT_END, KnownResponse

Integers = NDArray[np.int64]

SEPARATOR = -1
"""Separates sequences. No token has this number, so neither a match nor a draft leaves its sequence."""
MATCH = PROMPT_END
"""Longest match, in tokens."""
LEVELS: tuple[tuple[bool, int], ...] = ((True, 12), (True, 4), (False, 8), (False, 3))
"""The tables: whether only sequences of the same prompt count, and n. They were chosen on the quickstart's responses,
with those of earlier visits known: 6.3 tokens a pass, against 4.3 with n = 8 alone and 6.5 with six tables."""

_ADDED_TOKENS = 1 << 16
"""Tokens whose n-grams are entered at a time. It bounds the size of temporary arrays."""
_WEIGHTS = np.random.default_rng(0).integers(0, 2**63, MATCH, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_FIRST_WEIGHTS: list[int] = _WEIGHTS[: max(n for _, n in LEVELS)].tolist()
_ALL_BITS = 2**64 - 1
_FEW = 3
"""Most sequences that are looked up one by one."""
_SALT, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SALT_OF_ONE, _MIX_OF_ONE = int(_SALT), int(_MIX)
_LENGTHS = np.array([n for _, n in LEVELS]) - 1
_OWN = np.array([own for own, _ in LEVELS], dtype=np.uint64)[:, None]
_LEVEL = np.arange(len(LEVELS))[:, None]
_BACK = np.arange(1, MATCH + 1)


class DraftIndex:
    """Known responses and their n-grams, and room for sequences that still grow.

    Args:
        capacity: tokens of known responses to keep. Later ones then overwrite the oldest.
        rows: most growing sequences at a time.
        row_tokens: longest growing sequence, prompt and response together.
    """

    def __init__(self, capacity: int, rows: int = 0, row_tokens: int = 0) -> None:
        self._known_end = MATCH + max(capacity, 4 * MATCH)
        self._row_tokens = row_tokens + MATCH + 1
        # Zeros take no memory before they are written.
        self.tokens: NDArray[np.int32] = np.zeros(self._known_end + rows * self._row_tokens + MATCH, dtype=np.int32)
        self.tokens[:MATCH] = SEPARATOR
        self.starts: Integers = self._known_end + MATCH + np.arange(rows) * self._row_tokens
        """Start of each row's sequence in `tokens`."""
        for back in range(1, MATCH + 1):
            self.tokens[self.starts - back] = SEPARATOR
        bits = max(8, (len(self.tokens) * 3 // 2).bit_length())
        self._shift_of_one = 64 - bits
        self._shift = np.uint64(self._shift_of_one)
        self._tables = np.zeros((len(LEVELS), 1 << bits), dtype=np.int32)
        self._end = MATCH

    def add(self, responses: Sequence[KnownResponse]) -> None:
        """Add responses. Of equal n-grams, the last one's place is remembered."""
        pending: list[tuple[int, int, int]] = []
        began = self._end
        for response in responses:
            before = response.prompt_end[-MATCH:]
            room = self._known_end - MATCH - len(before) - 1
            sequence = np.array([*before, *response.tokens[:room], SEPARATOR], dtype=np.int32)
            if self._end + len(sequence) > self._known_end:
                self._enter_range(began, pending)
                pending, began = [], MATCH
                self._end = MATCH
            start = self._end
            self._end += len(sequence)
            self.tokens[start : self._end] = sequence
            pending.append((start + max(1, len(before)), self._end - 1, response.prompt))
            if self._end - began > _ADDED_TOKENS:
                self._enter_range(began, pending)
                pending, began = [], self._end
        self._enter_range(began, pending)

    def _enter_range(self, start: int, sequences: Sequence[tuple[int, int, int]]) -> None:
        """Enter whole sequences that are adjacent from `start` on; see `enter`.

        Args:
            sequences: first place, last place + 1 and prompt of each.
        """
        if not sequences:
            return
        firsts, ends, prompts = np.array(sequences).T
        counts = ends - firsts
        places = np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
        mixed = np.zeros(ends[-1] - start, dtype=np.uint64)
        mixtures = {}
        for back, weight in enumerate(_WEIGHTS[: max(n for _, n in LEVELS)], start=1):
            mixed += self.tokens[start - back : ends[-1] - back].astype(np.uint64) * weight
            mixtures[back] = mixed[places - start] if any(back == n for _, n in LEVELS) else mixed[:0]
        hashed = np.stack([mixtures[n] for _, n in LEVELS])
        self._remember(self._salted(hashed, np.repeat(prompts, counts)), places)

    def enter(self, places: Integers, prompts: Integers) -> None:
        """Enter places, each as a continuation of the tokens before it."""
        self._remember(self._slots(self._before(places), prompts), places)

    def _remember(self, slots: NDArray[np.int64], places: Integers) -> None:
        # Table by table: only then does the last of equal n-grams count.
        for table, its in zip(self._tables, slots, strict=True):
            table[its] = places

    def look_up(self, ends: Integers, prompts: Integers) -> tuple[Integers, Integers]:
        """Find the longest match of the tokens before each of `ends`.

        Args:
            ends: place after the newest token of each sequence.
            prompts: row of each sequence's prompt.

        Returns:
            The place of the token that followed the match, and the number of matching tokens: at most `MATCH`, 0
            without a match.
        """
        if len(ends) <= _FEW:
            found = [self._look_up_one(*each) for each in zip(ends.tolist(), prompts.tolist(), strict=True)]
            places, matching = zip(*found, strict=True) if found else ((), ())
            return np.array(places, dtype=np.int64), np.array(matching, dtype=np.int64)
        known = self._before(ends)
        candidates = self._tables[_LEVEL, self._slots(known, prompts)]
        equal = (self.tokens[candidates[..., None] - _BACK] == known) & (known != SEPARATOR)
        # The first token that differs ends the match. A sentinel ends matches without one.
        unequal = np.concatenate([~equal, np.ones((*equal.shape[:2], 1), dtype=bool)], axis=2)
        lengths = unequal.argmax(axis=2)
        lengths[self.tokens[candidates] == SEPARATOR] = 0
        best = lengths.argmax(axis=0)
        column = np.arange(len(ends))
        return candidates[best, column].astype(np.int64), lengths[best, column]

    def _look_up_one(self, end: int, prompt: int) -> tuple[int, int]:
        """Do the same for one sequence: numpy takes longer for one than for ten."""
        tokens = self.tokens
        known = tokens[end - MATCH : end].tolist()
        known.reverse()
        mixed, mixtures = 0, [0]
        for token, weight in zip(known, _FIRST_WEIGHTS, strict=False):
            mixed += token * weight
            mixtures.append(mixed)
        own = (prompt + 1) * _SALT_OF_ONE
        best, longest, seen = 0, -1, -1
        for table, (is_own, n) in zip(self._tables, LEVELS, strict=True):
            hashed = (mixtures[n] + own if is_own else mixtures[n]) & _ALL_BITS
            place = table.item((((hashed ^ (hashed >> 31)) * _MIX_OF_ONE) & _ALL_BITS) >> self._shift_of_one)
            if place == seen:
                continue
            seen, length = place, 0
            if tokens.item(place) != SEPARATOR:
                before = tokens[place - MATCH : place].tolist()
                before.reverse()
                for token, its in zip(known, before, strict=True):
                    if token != its or token == SEPARATOR:
                        break
                    length += 1
            if length > longest:
                best, longest = place, length
                if length == MATCH:
                    break
        return best, longest

    def _before(self, places: Integers) -> NDArray[np.int32]:
        """Return [places, MATCH] tokens before each place, the nearest first."""
        return self.tokens[places[:, None] - _BACK]

    def _slots(self, before: NDArray[np.int32], prompts: Integers) -> NDArray[np.int64]:
        """Return [levels, places] slots of the tables for the continuation of these tokens."""
        longest = int(_LENGTHS.max()) + 1
        mixed = np.cumsum(before[:, :longest].astype(np.uint64) * _WEIGHTS[:longest], axis=1, dtype=np.uint64)
        return self._salted(mixed[:, _LENGTHS].T, prompts)

    def _salted(self, mixed: NDArray[np.uint64], prompts: Integers) -> NDArray[np.int64]:
        hashed = mixed + (prompts.astype(np.uint64) + np.uint64(1)) * _SALT * _OWN
        return (((hashed ^ (hashed >> np.uint64(31))) * _MIX) >> self._shift).astype(np.int64)
