"""The gain of drafting: tokens a pass by the number drafted, and the pace of an instance that drafts as many as pay.

A pass with j drafted tokens for each sequence gives 1 + f(j) tokens a sequence on average, and computes j rows more.
In a *round* every sequence gains one token. Counted in rounds, the pass is again a linear model: all of its seconds
divided by 1 + f(j). An engine drafts the number that makes a round shortest, so its rounds take the least of a few
linear models. docs/research/planner.md derives the effect on plans and bounds.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.latency.linear import LinearLatency

Floats = NDArray[np.float64]

LONGEST_DRAFT = 16
"""Most tokens drafted for a sequence in a pass, if nothing else is known."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The frequency of drafts, and the chance that they are right."""

    coverage: float
    """Share of a sequence's passes in which tokens can be drafted for it."""
    acceptance: float
    """Chance that a drafted token is right if all those before it were."""
    longest: int = LONGEST_DRAFT
    """Most tokens drafted for a sequence in a pass."""

    def __post_init__(self) -> None:
        for name in ("coverage", "acceptance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: a share is between 0 and 1")
        if self.longest < 1:
            raise ValueError(f"longest is {self.longest}: a draft has at least 1 token")

    def tokens(self, drafted: int) -> float:
        """Return the mean tokens that a sequence gains in a pass, if `drafted` are drafted whenever there are any."""
        return 1 + self.coverage * sum(self.acceptance**number for number in range(1, drafted + 1))

    def rows(self, drafted: int) -> float:
        """Return the mean rows that `drafted` tokens add to a pass for each sequence."""
        return self.coverage * drafted


@dataclass(frozen=True)
class DraftedLatency:
    """The pace of an instance that drafts the best number of tokens for its rounds: a `Latency` of rounds."""

    plain: LinearLatency
    """Latency of passes; its `draft_seconds` are those of a drafted row."""
    drafts: Drafts
    lines: tuple[LinearLatency, ...] = field(init=False, repr=False)
    """[tokens drafted, from 0 on] Latency of rounds with this number."""
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
        """[tokens drafted, from 0 on] Mean tokens that a sequence gains in a pass."""
        return tuple(map(self.drafts.tokens, range(self.drafts.longest + 1)))

    def at(self, batch: float, context: float) -> LinearLatency:
        """Return the latency with the best number of drafts for `batch` sequences with a mean context of `context`.

        The instance takes no batch longer than any of `lines` says, so each of them is a forecast on the safe side.
        """
        step, sequence, per_token = self._columns
        return self.lines[int((step + batch * (sequence + per_token * context)).argmin())]

    def decode_seconds(self, batch: int, context: float) -> float:
        """Return the seconds of one round of `batch` sequences with a mean context of `context` tokens."""
        return self.at(batch, context).decode_seconds(batch, context)

    def round_seconds(self, batch: Floats, contexts: Floats) -> Floats:
        """Return the seconds of rounds, elementwise.

        Args:
            batch: number of sequences.
            contexts: tokens in the contexts of all of them.
        """
        step, sequence, per_token = self._columns[:, :, None]
        least: Floats = (step + sequence * batch + per_token * contexts).min(axis=0)
        return least


def drafted_line(plain: LinearLatency, drafts: Drafts, drafted: int) -> LinearLatency:
    """Return the latency of rounds of an instance that drafts `drafted` tokens for a sequence whenever it can."""
    tokens = drafts.tokens(drafted)
    rows = drafts.rows(drafted) * plain.draft_seconds
    return LinearLatency(
        plain.step_seconds / tokens,
        (plain.sequence_seconds + rows) / tokens,
        plain.context_seconds / tokens,
        plain.prefill_token_seconds,
        plain.draft_seconds,
    )
