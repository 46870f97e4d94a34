"""What drafting brings: tokens a pass by how many are drafted, and the pace of an instance that drafts as many as pay.

A pass with j drafted tokens for each sequence gives 1 + f(j) tokens a sequence on average, and computes j rows more.
Counted in *rounds*, in each of which every sequence gains one token, that is again a linear model: all seconds of a
pass divided by 1 + f(j). An engine drafts as many as make a round shortest, so its rounds take the least of a few
linear models. docs/research/planner.md says what that does to plans and bounds.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.latency.linear import LinearLatency

Floats = NDArray[np.float64]

LONGEST_DRAFT = 16
"""Tokens drafted for a sequence in a pass, at most, where nothing else is known."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """How often there is something to draft, and how often it is right."""

    coverage: float
    """Share of a sequence's passes in which there is something to draft for it."""
    acceptance: float
    """Chance that a drafted token is right if all those before it were."""
    longest: int = LONGEST_DRAFT
    """Tokens drafted for a sequence in a pass, at most."""

    def __post_init__(self) -> None:
        for name in ("coverage", "acceptance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: a share is between 0 and 1")
        if self.longest < 1:
            raise ValueError(f"longest is {self.longest}: a draft has at least 1 token")

    def tokens(self, drafted: int) -> float:
        """Tokens that a sequence gains in a pass, on average, if so many are drafted where there is something to."""
        return 1 + self.coverage * sum(self.acceptance**number for number in range(1, drafted + 1))

    def rows(self, drafted: int) -> float:
        """Rows that they add to a pass for each sequence, on average."""
        return self.coverage * drafted


@dataclass(frozen=True)
class DraftedLatency:
    """The pace of an instance that drafts as many tokens as make its rounds shortest: a `Latency` of rounds."""

    plain: LinearLatency
    """Of passes; its `draft_seconds` are those of a drafted row."""
    drafts: Drafts
    lines: tuple[LinearLatency, ...] = field(init=False, repr=False)
    """[tokens drafted, from 0 on] rounds with so many."""
    _columns: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lines = tuple(drafted_line(self.plain, self.drafts, each) for each in range(self.drafts.longest + 1))
        columns = [(line.step_seconds, line.sequence_seconds, line.context_seconds) for line in lines]
        object.__setattr__(self, "lines", lines)
        object.__setattr__(self, "_columns", np.array(columns).T)

    @property
    def prefill_token_seconds(self) -> float:
        """Seconds for each prompt token."""
        return self.plain.prefill_token_seconds

    @property
    def tokens(self) -> tuple[float, ...]:
        """[tokens drafted, from 0 on] Tokens that a sequence gains in a pass, on average."""
        return tuple(map(self.drafts.tokens, range(self.drafts.longest + 1)))

    def at(self, batch: float, context: float) -> LinearLatency:
        """Rounds with the number of drafts that is best for `batch` sequences with a mean context of so many tokens.

        No batch takes longer by any of `lines` than it does, so each is a forecast on the safe side.
        """
        step, sequence, per_token = self._columns
        return self.lines[int((step + batch * (sequence + per_token * context)).argmin())]

    def decode_seconds(self, batch: int, context: float) -> float:
        """Seconds of one round of `batch` sequences with a mean context of `context` tokens."""
        return self.at(batch, context).decode_seconds(batch, context)

    def round_seconds(self, batch: Floats, contexts: Floats) -> Floats:
        """Seconds of rounds, elementwise.

        Args:
            batch: sequences.
            contexts: tokens in the contexts of all of them.
        """
        step, sequence, per_token = self._columns[:, :, None]
        least: Floats = (step + sequence * batch + per_token * contexts).min(axis=0)
        return least


def drafted_line(plain: LinearLatency, drafts: Drafts, drafted: int) -> LinearLatency:
    """Rounds of an instance that always drafts so many tokens for each sequence for which there are any."""
    tokens = drafts.tokens(drafted)
    rows = drafts.rows(drafted) * plain.draft_seconds
    return LinearLatency(
        plain.step_seconds / tokens,
        (plain.sequence_seconds + rows) / tokens,
        plain.context_seconds / tokens,
        plain.prefill_token_seconds,
        plain.draft_seconds,
    )
