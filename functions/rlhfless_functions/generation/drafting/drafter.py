"""Drafts for the sequences of a run: proposes those of the next pass, and learns from their outcome."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlhfless_functions.data.draft_history import KnownResponse
from rlhfless_functions.generation.drafting.acceptance import LONGEST, Acceptance
from rlhfless_functions.generation.drafting.costs import PassCosts, best_width, worthwhile
from rlhfless_functions.generation.drafting.history import HistoryLoader
from rlhfless_functions.generation.drafting.index import MATCH, SEPARATOR, DraftIndex, Integers
from rlhfless_functions.generation.drafting.switch import Switch

KNOWN_TOKENS = 1 << 22
"""Most tokens of known responses in an index: up to 150 MB."""
LONGEST_DRAFT = 32
"""Most tokens drafted for a sequence in a pass."""
SHORT_DRAFT = 16
"""Most tokens drafted for a sequence in a batch of many sequences."""
_LEAST_CHANCE = 0.05


TokensOf = Callable[[int], tuple[int, Sequence[int], Sequence[int]]]
"""Returns, for a row, the row of its prompt, the prompt's tokens and the response's tokens."""


@dataclass(frozen=True)
class Drafts:
    """Tokens to try in a pass. The tokens of a sequence are adjacent, in their order."""

    slots: Integers
    """[drafts] row of the sequence in the batch."""
    offsets: Integers
    """[drafts] 1 for the token behind the newest one, and so on."""
    tokens: Integers


@dataclass(frozen=True)
class PassTiming:
    """The size and the time of a pass."""

    seconds: float
    rows: int
    """Computed rows, padding included."""
    plain_rows: int
    """Rows that it would have computed without drafts."""
    used_rows: int
    """Computed rows that are not padding."""


class DraftExperience:
    """An engine's experience with drafting. It is a cache: without it drafts are worse, and the sampled tokens are the
    same.

    Args:
        device: type of the device.
    """

    def __init__(self, device: str) -> None:
        self.acceptance = Acceptance()
        self.costs = PassCosts(device)
        self.switch = Switch(device)


@dataclass
class DraftCounts:
    """Counts of drafting in a run, as fields of `DecodeCounts`."""

    drafted: int = 0
    """Drafted tokens."""
    accepted: int = 0
    """Drafted tokens that were right."""
    judged: int = 0
    """Drafted tokens that were right, plus the first wrong one of each draft."""
    looked_up: int = 0
    """Number of times that drafts for a sequence were looked up before a pass."""
    matched: int = 0
    """Number of times that a look-up found something to draft."""
    drafting_seconds: float = 0.0
    """Seconds to look for drafts and to learn from their outcome."""


@dataclass
class _Rows:
    """The state of each row's sequence."""

    prompts: Integers
    ends: Integers
    """Number of tokens, prompt and response."""
    places: Integers
    """Place in the index of the token that is expected next; −1 if there is none."""
    matches: Integers
    """Number of matching tokens before that place."""
    factors: NDArray[np.float64]
    """Factor of the chance that its drafts are right, relative to the match's length alone."""
    prompt_ends: dict[int, Sequence[int]] = field(default_factory=dict)


class Drafter:
    """Proposes drafts and learns from their outcome; see `Drafts`.

    Args:
        experience: the engine's experience.
        rows: most sequences at a time.
        sequence_tokens: longest sequence, prompt and response.
        known_tokens: estimated number of tokens of known responses.
        vocabulary: size of the vocabulary. Tokens from it on can't be drafted.
        history: responses of earlier visits, as they arrive; None if there are none.
    """

    def __init__(
        self,
        experience: DraftExperience,
        rows: int,
        sequence_tokens: int,
        known_tokens: int,
        vocabulary: int,
        history: HistoryLoader | None = None,
    ) -> None:
        self.experience = experience
        self._vocabulary = vocabulary
        self._history = history
        self._index = DraftIndex(min(KNOWN_TOKENS, known_tokens), rows, sequence_tokens)
        self._rows = _Rows(
            np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64), np.full(rows, -1),
            np.zeros(rows, dtype=np.int64), np.ones(rows),
        )  # fmt: skip
        self._stale = np.ones(rows, dtype=bool)
        self._expected: NDArray[np.float64] = np.zeros(rows)
        """[rows] expected number of right tokens among those proposed for each sequence."""
        self._looked = 0.0
        self.counts = DraftCounts()
        experience.acceptance.forget_prompts()

    def on(self, sequences: int) -> bool:
        """Return whether the next pass, of so many sequences, may have drafts. Ask once for each pass, and tell
        `sampled` of the pass if it may."""
        if self.experience.switch.on(sequences):
            return True
        self._stale[:] = True
        return False

    def counted(self) -> dict[str, float]:
        """Return the counts of drafting, as fields of `DecodeCounts`."""
        return {**asdict(self.counts), "unreadable": self._history.unreadable if self._history is not None else 0}

    def propose(
        self,
        active: Integers,
        remaining: Integers,
        tokens_of: TokensOf,
        rows: int,
        padded: Callable[[int], int],
        most: int,
        widths: Sequence[int] = (),
    ) -> Drafts | None:
        """Propose the drafts of the next pass, if any.

        Args:
            active: rows with a sequence.
            remaining: most further response tokens of each, at least one.
            tokens_of: called for rows whose sequence is new here.
            rows: rows of the pass without drafts.
            padded: returns the rows that a pass computes, given those that it needs.
            most: most rows of a pass.
            widths: numbers of rows that all sequences may have in a pass, smallest first; empty if each may have its
                own. The caller fills up shorter drafts.
        """
        began = time.perf_counter()
        try:
            if self._history is not None and (known := self._history.take()):
                self._index.add(known)
            self._seat(active[self._stale[active]].tolist(), tokens_of)
            self._find(active)
            self.counts.looked_up += len(active)
            return self._choose(active, remaining, rows, padded, most, widths)
        finally:
            self._looked = time.perf_counter() - began
            self.counts.drafting_seconds += self._looked

    def _seat(self, slots: list[int], tokens_of: TokensOf) -> None:
        """Record the sequences that are new here, or that continued while drafting was off."""
        row, index, acceptance = self._rows, self._index, self.experience.acceptance
        places, prompts = [], []
        seen: set[int] = set()
        for slot in slots:
            prompt, prompt_tokens, response_tokens = tokens_of(slot)
            start = int(index.starts[slot])
            end = start + len(prompt_tokens) + len(response_tokens)
            index.tokens[start : end + 1] = (*prompt_tokens, *response_tokens, SEPARATOR)
            row.prompts[slot], row.ends[slot], row.places[slot], row.matches[slot] = prompt, end - start, -1, 0
            row.factors[slot] = acceptance.factor(prompt)
            row.prompt_ends[slot] = prompt_tokens[-MATCH:]
            self._stale[slot] = False
            # A group's prompt adds its n-grams once.
            first = start + 1 if prompt not in seen else start + len(prompt_tokens)
            seen.add(prompt)
            places.append(np.arange(first, end))
            prompts.append(prompt)
        if places:
            index.enter(np.concatenate(places), np.repeat(prompts, [len(each) for each in places]))

    def _find(self, active: Integers) -> None:
        """Look up the sequences without a match, or with one that a longer match might replace."""
        row = self._rows
        unsure = active[row.matches[active] < MATCH]
        if len(unsure):
            places, lengths = self._index.look_up(self._index.starts[unsure] + row.ends[unsure], row.prompts[unsure])
            longer = lengths > row.matches[unsure]
            better = unsure[longer]
            row.places[better], row.matches[better] = places[longer], lengths[longer]

    def _choose(
        self,
        active: Integers,
        remaining: Integers,
        rows: int,
        padded: Callable[[int], int],
        most: int,
        widths: Sequence[int],
    ) -> Drafts | None:
        row, learnt = self._rows, self.experience
        # Every pass gives a token anyway, so the last allowed token is never a draft.
        hopeful = (row.places[active] >= 0) & (remaining > 1)
        slots, room = active[hopeful], remaining[hopeful] - 1
        if not len(slots):
            return None
        width = LONGEST_DRAFT if len(active) <= SHORT_DRAFT else SHORT_DRAFT
        offsets = np.arange(width)
        places = np.minimum(row.places[slots][:, None] + offsets, len(self._index.tokens) - 1)
        tokens = self._index.tokens[places]
        possible = (tokens >= 0) & (tokens < self._vocabulary) & (offsets < room[:, None])
        chances = learnt.acceptance.chances(row.matches[slots], width) * row.factors[slots][:, None]
        chances = np.where(np.logical_and.accumulate(possible, axis=1), np.minimum(chances, 1.0), 0.0)
        self.counts.matched += int((chances[:, 0] >= _LEAST_CHANCE).sum())
        flat = chances.ravel()
        if widths:
            # Within the width a token costs nothing more, however unlikely it is.
            drafted = best_width(chances, len(active), widths, most, learnt.costs) - 1
            chosen = np.flatnonzero((chances > 0) & (offsets < drafted))
        else:
            # Stable sort: among equal probabilities in a row, the nearer token comes first, and a choice has no gaps.
            order = np.argsort(-flat, kind="stable")
            order = order[: np.searchsorted(-flat[order], -_LEAST_CHANCE)]
            if not len(order):
                return None
            count = worthwhile(flat[order], len(active), rows, padded, most, learnt.costs)
            chosen = np.sort(order[:count])
        if not len(chosen):
            return None
        which, position = np.divmod(chosen, width)
        self._expected[slots] = np.bincount(which, flat[chosen], len(slots))
        return Drafts(slots[which], position + 1, tokens.ravel()[chosen].astype(np.int64))

    def sampled(
        self, active: Integers, counts: Integers, tokens: Integers, drafts: Drafts | None, timing: PassTiming
    ) -> None:
        """Learn from the tokens of a pass.

        Args:
            active: rows with a sequence.
            counts: number of tokens that each got, at least one.
            tokens: all tokens; those of a row are adjacent.
            drafts: the tried drafts.
            timing: size and time of the pass.
        """
        began = time.perf_counter()
        learnt = self.experience
        matches = self._rows.matches[active]
        self._write(active, counts, tokens)
        accepted = self._judge(active, counts, matches, drafts) if drafts is not None else 0
        host = time.perf_counter() - began
        self.counts.drafting_seconds += host
        plain = learnt.costs.seconds(timing.plain_rows)
        cost = self._looked + host
        if drafts is None:
            learnt.costs.measured(timing.rows, 0, timing.seconds)
        else:
            drafted = timing.rows - timing.used_rows
            learnt.costs.measured(timing.rows, drafted, timing.seconds + cost)
            cost = learnt.costs.seconds(timing.rows, drafted) - plain
        # Without drafts, the accepted tokens would have taken as many more passes.
        learnt.switch.drafted(len(active), accepted * plain / len(active), cost)

    def _write(self, active: Integers, counts: Integers, tokens: Integers) -> None:
        """Append the new tokens to the sequences, and extend their matches."""
        row, index = self._rows, self._index
        firsts = np.cumsum(counts) - counts
        within = np.arange(len(tokens)) - np.repeat(firsts, counts)
        places = np.repeat(index.starts[active] + row.ends[active], counts) + within
        index.tokens[places] = tokens
        row.ends[active] += counts
        index.tokens[index.starts[active] + row.ends[active]] = SEPARATOR
        index.enter(places, np.repeat(row.prompts[active], counts))
        # A match continues if the newest token is the one that it expected. Earlier ones were drafted from it.
        expected = row.places[active] + counts
        goes_on = (row.places[active] >= 0) & (index.tokens[expected - 1] == tokens[firsts + counts - 1])
        goes_on &= index.tokens[expected] != SEPARATOR
        row.places[active] = np.where(goes_on, expected, -1)
        row.matches[active] = np.where(goes_on, np.minimum(row.matches[active] + counts, LONGEST), 0)

    def _judge(self, active: Integers, counts: Integers, matches: Integers, drafts: Drafts) -> int:
        """Learn from the outcome of drafts, and return how many were right."""
        slots, tried = np.unique(drafts.slots, return_counts=True)
        order = np.searchsorted(active, slots)
        right = np.minimum(counts[order] - 1, tried)
        acceptance, row = self.experience.acceptance, self._rows
        acceptance.learn(matches[order], tried, right)
        for slot, number, expected in zip(slots.tolist(), right.tolist(), self._expected[slots].tolist(), strict=True):
            prompt = int(row.prompts[slot])
            acceptance.learn_prompt(prompt, number, expected)
            row.factors[slot] = acceptance.factor(prompt)
        self.counts.drafted += len(drafts.tokens)
        self.counts.accepted += int(right.sum())
        self.counts.judged += int(np.minimum(right + 1, tried).sum())
        return int(right.sum())

    def released(self, slots: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """Keep the responses of sequences that have ended: their siblings may continue in the same way."""
        row = self._rows
        known = [
            KnownResponse(int(row.prompts[slot]), row.prompt_ends[slot], tokens)
            for slot, tokens in zip(slots, responses, strict=True)
            if not self._stale[slot]
        ]
        self._index.add(known)
        self._stale[slots] = True

    def moved(self, sources: Integers, slots: Integers) -> None:
        """Record that sequences have changed their rows."""
        self._stale[slots] = True
        self._stale[sources] = True
