"""Drafts for the sequences of a run: what to try in the next pass, and what became of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlhfless_functions.data.draft_history import KnownResponse
from rlhfless_functions.generation.drafting.acceptance import LONGEST, Acceptance
from rlhfless_functions.generation.drafting.costs import PassCosts, worthwhile
from rlhfless_functions.generation.drafting.history import HistoryLoader
from rlhfless_functions.generation.drafting.index import MATCH, SEPARATOR, DraftIndex, Integers
from rlhfless_functions.generation.drafting.switch import Switch

KNOWN_TOKENS = 1 << 22
"""Most tokens of known responses in an index: up to 150 MB."""
LONGEST_DRAFT = 32
"""Tokens drafted for a sequence in a pass, at most."""
SHORT_DRAFT = 16
"""The same in a batch of more than so many sequences."""
_LEAST_CHANCE = 0.05


TokensOf = Callable[[int], tuple[int, Sequence[int], Sequence[int]]]
"""(row) → its prompt's row, prompt tokens and response tokens."""


@dataclass(frozen=True)
class Drafts:
    """Tokens to try in a pass. Those of a sequence stand together, in their order."""

    slots: Integers
    """[drafts] row of the sequence."""
    offsets: Integers
    """[drafts] 1 for the token behind the newest one, and so on."""
    tokens: Integers


@dataclass(frozen=True)
class PassTiming:
    """What a pass took."""

    seconds: float
    rows: int
    """That it computed, padding included."""
    plain_rows: int
    """That it would have computed without drafts."""
    used_rows: int
    """The ones that are not padding."""


class DraftExperience:
    """What an engine has learnt of drafting. It is a cache: without it drafts are worse, and tokens the same.

    Args:
        device: its type.
    """

    def __init__(self, device: str) -> None:
        self.acceptance = Acceptance()
        self.costs = PassCosts(device)
        self.switch = Switch(device)


@dataclass
class DraftCounts:
    """What drafting did in a run."""

    tried: int = 0
    """Tokens drafted."""
    accepted: int = 0
    """Those that were right."""
    judged: int = 0
    """Those that were right, and the first wrong one of each draft."""
    looked_up: int = 0
    """Times that a sequence was looked up before a pass."""
    matched: int = 0
    """Times that there was something to draft for it."""
    seconds: float = 0.0
    """Time that looking for drafts and telling what became of them took."""


@dataclass
class _Rows:
    """What is known of each row's sequence."""

    prompts: Integers
    ends: Integers
    """Tokens, prompt and response."""
    places: Integers
    """Where the index has the token that is expected next; −1 where it has none."""
    matches: Integers
    """How many tokens match before that place."""
    factors: NDArray[np.float64]
    """How much likelier than by the match alone its drafts are to be right."""
    prompt_ends: dict[int, Sequence[int]] = field(default_factory=dict)


class Drafter:
    """Proposes drafts and learns from what becomes of them; see `Drafts`.

    Args:
        experience: the engine's.
        rows: sequences at a time.
        sequence_tokens: longest sequence, prompt and response.
        known_tokens: tokens of known responses that there will be, at a guess.
        vocabulary: tokens from it on can't be drafted.
        history: responses of earlier visits, as they come; None where there are none.
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
        self._experience = experience
        self._vocabulary = vocabulary
        self._history = history
        self._index = DraftIndex(min(KNOWN_TOKENS, known_tokens), rows, sequence_tokens)
        self._rows = _Rows(
            np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64), np.full(rows, -1),
            np.zeros(rows, dtype=np.int64), np.ones(rows),
        )  # fmt: skip
        self._stale = np.ones(rows, dtype=bool)
        self._expected: NDArray[np.float64] = np.zeros(rows)
        """[rows] how many of the tokens proposed for each sequence are expected to be right."""
        self._looked = 0.0
        self.counts = DraftCounts()
        experience.acceptance.forget_prompts()

    def on(self, sequences: int) -> bool:
        """Whether the next pass, of so many sequences, may have drafts; what it samples is told by `sampled` then. To
        be asked once for each pass."""
        if self._experience.switch.on(sequences):
            return True
        self._stale[:] = True
        return False

    def counted(self) -> dict[str, float]:
        """What drafting did, as `DecodeCounts` has it."""
        return {
            "drafted": self.counts.tried,
            "accepted": self.counts.accepted,
            "judged": self.counts.judged,
            "looked_up": self.counts.looked_up,
            "matched": self.counts.matched,
            "drafting_seconds": self.counts.seconds,
            "unreadable": self._history.unreadable if self._history is not None else 0,
        }

    def propose(
        self,
        active: Integers,
        remaining: Integers,
        tokens_of: TokensOf,
        rows: int,
        padded: Callable[[int], int],
        most: int,
    ) -> Drafts | None:
        """What to try in the next pass, if anything.

        Args:
            active: rows that have a sequence.
            remaining: response tokens that each of them may still have, at least one.
            tokens_of: asked of rows whose sequence is new here.
            rows: of the pass without drafts.
            padded: rows that a pass of so many computes.
            most: rows that a pass may have.
        """
        began = time.perf_counter()
        try:
            if self._history is not None and (known := self._history.take()):
                self._index.add(known)
            self._seat(active[self._stale[active]].tolist(), tokens_of)
            self._find(active)
            self.counts.looked_up += len(active)
            return self._choose(active, remaining, rows, padded, most)
        finally:
            self._looked = time.perf_counter() - began
            self.counts.seconds += self._looked

    def _seat(self, slots: list[int], tokens_of: TokensOf) -> None:
        """Write down sequences that are new here, or that went on while drafting was off."""
        row, index, acceptance = self._rows, self._index, self._experience.acceptance
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
            # The n-grams of a prompt are entered once for its group.
            first = start + 1 if prompt not in seen else start + len(prompt_tokens)
            seen.add(prompt)
            places.append(np.arange(first, end))
            prompts.append(prompt)
        if places:
            index.enter(np.concatenate(places), np.repeat(prompts, [len(each) for each in places]))

    def _find(self, active: Integers) -> None:
        """Look up the sequences that have no match, or one that a longer one might replace."""
        row = self._rows
        unsure = active[row.matches[active] < MATCH]
        if len(unsure):
            places, lengths = self._index.look_up(self._index.starts[unsure] + row.ends[unsure], row.prompts[unsure])
            longer = lengths > row.matches[unsure]
            better = unsure[longer]
            row.places[better], row.matches[better] = places[longer], lengths[longer]

    def _choose(
        self, active: Integers, remaining: Integers, rows: int, padded: Callable[[int], int], most: int
    ) -> Drafts | None:
        row, learnt = self._rows, self._experience
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
        """Take in a pass's tokens.

        Args:
            active: rows that had a sequence.
            counts: tokens that each got, at least one.
            tokens: all of them, those of a row together.
            drafts: that were tried.
            timing: of the pass.
        """
        began = time.perf_counter()
        learnt = self._experience
        matches = self._rows.matches[active]
        self._write(active, counts, tokens)
        accepted = self._judge(active, counts, matches, drafts) if drafts is not None else 0
        host = time.perf_counter() - began
        self.counts.seconds += host
        plain = learnt.costs.seconds(timing.plain_rows)
        cost = self._looked + host
        if drafts is None:
            learnt.costs.measured(timing.rows, 0, timing.seconds)
        else:
            drafted = timing.rows - timing.used_rows
            learnt.costs.measured(timing.rows, drafted, timing.seconds + cost)
            cost = learnt.costs.seconds(timing.rows, drafted) - plain
        # Tokens that were drafted would have taken their sequences as many passes more.
        learnt.switch.drafted(len(active), accepted * plain / len(active), cost)

    def _write(self, active: Integers, counts: Integers, tokens: Integers) -> None:
        """Let the sequences grow, and their matches with them."""
        row, index = self._rows, self._index
        firsts = np.cumsum(counts) - counts
        within = np.arange(len(tokens)) - np.repeat(firsts, counts)
        places = np.repeat(index.starts[active] + row.ends[active], counts) + within
        index.tokens[places] = tokens
        row.ends[active] += counts
        index.tokens[index.starts[active] + row.ends[active]] = SEPARATOR
        index.enter(places, np.repeat(row.prompts[active], counts))
        # A match goes on where the newest token is what it expected; those before it had been drafted from it.
        expected = row.places[active] + counts
        goes_on = (row.places[active] >= 0) & (index.tokens[expected - 1] == tokens[firsts + counts - 1])
        goes_on &= index.tokens[expected] != SEPARATOR
        row.places[active] = np.where(goes_on, expected, -1)
        row.matches[active] = np.where(goes_on, np.minimum(row.matches[active] + counts, LONGEST), 0)

    def _judge(self, active: Integers, counts: Integers, matches: Integers, drafts: Drafts) -> int:
        """Learn from what became of the drafts; returns how many were right."""
        slots, tried = np.unique(drafts.slots, return_counts=True)
        order = np.searchsorted(active, slots)
        right = np.minimum(counts[order] - 1, tried)
        acceptance, row = self._experience.acceptance, self._rows
        acceptance.learn(matches[order], tried, right)
        for slot, number, expected in zip(slots.tolist(), right.tolist(), self._expected[slots].tolist(), strict=True):
            prompt = int(row.prompts[slot])
            acceptance.learn_prompt(prompt, number, expected)
            row.factors[slot] = acceptance.factor(prompt)
        self.counts.tried += len(drafts.tokens)
        self.counts.accepted += int(right.sum())
        self.counts.judged += int(np.minimum(right + 1, tried).sum())
        return int(right.sum())

    def released(self, slots: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """Sequences have ended: their siblings may go the same way."""
        row = self._rows
        known = [
            KnownResponse(int(row.prompts[slot]), row.prompt_ends[slot], tokens)
            for slot, tokens in zip(slots, responses, strict=True)
            if not self._stale[slot]
        ]
        self._index.add(known)
        self._stale[slots] = True

    def moved(self, sources: Integers, slots: Integers) -> None:
        """Sequences have other rows now."""
        self._stale[slots] = True
        self._stale[sources] = True
