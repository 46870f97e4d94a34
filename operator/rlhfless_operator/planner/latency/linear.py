"""The latency of an instance: the linear model that plans use, and the tables that it is fitted to."""

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Latency(Protocol):
    """The time of rounds. In a round every sequence of a batch gains a token.

    Without drafts a round is a decode step, and linear (`LinearLatency`). With drafts it takes the least of a few
    linear models (`drafting.DraftedLatency`).
    """

    @property
    def lines(self) -> Sequence["LinearLatency"]:
        """The linear models; the least of them holds."""

    @property
    def tokens(self) -> Sequence[float]:
        """[lines] Mean tokens that a sequence gains in a decode step."""

    @property
    def prefill_token_seconds(self) -> float:
        """Seconds for each prompt token."""

    def at(self, batch: float, context: float) -> "LinearLatency":
        """Return the linear model that holds for `batch` sequences with a mean context of `context` tokens."""

    def decode_seconds(self, batch: int, context: float) -> float:
        """Return the seconds of one round of `batch` sequences with a mean context of `context` tokens."""

    def round_seconds(self, batch: Floats, contexts: Floats) -> Floats:
        """Return the seconds of rounds, elementwise: by sequences and by the tokens in all their contexts."""


@dataclass(frozen=True, slots=True)
class LinearLatency:
    """A decode step of a batch takes `step_seconds` plus, for each sequence, a part that grows with its context.

    The constant is the reading of the weights; the rest is the reading of the KV cache and the arithmetic.
    """

    step_seconds: float
    """Seconds of a decode step that do not depend on its batch: the `a` of a + c·b."""
    sequence_seconds: float = 0.0
    """Seconds that each sequence adds to a decode step: the `c`."""
    context_seconds: float = 0.0
    """Seconds that each token in a sequence's context adds to a decode step."""
    prefill_token_seconds: float = 0.0
    """Seconds for each prompt token."""
    draft_seconds: float = 0.0
    """Seconds that each drafted token adds to a decode step: the arithmetic of its row. It reads no keys and values
    that its sequence does not read anyway."""

    def __post_init__(self) -> None:
        for name in ("step_seconds", "sequence_seconds", "context_seconds", "prefill_token_seconds", "draft_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: a latency is 0 or more seconds")
        if self.step_seconds + self.sequence_seconds + self.context_seconds == 0:
            raise ValueError("step_seconds is 0 and so are the others: decoding takes some time")

    def times(self, factor: float) -> "LinearLatency":
        """Return a latency whose work takes `factor` times as long."""
        return LinearLatency(*(factor * seconds for seconds in astuple(self)))

    def decode_seconds(self, batch: int, context: float) -> float:
        """Return the seconds of one decode step of `batch` sequences with a mean context of `context` tokens."""
        return self.step_seconds + batch * (self.sequence_seconds + self.context_seconds * context)

    @property
    def lines(self) -> tuple["LinearLatency", ...]:
        """Only this model; see `DraftedLatency`."""
        return (self,)

    @property
    def tokens(self) -> tuple[float, ...]:
        """One: the token that a sequence gains in a decode step."""
        return (1.0,)

    def at(self, batch: float, context: float) -> "LinearLatency":
        """Return this model: it holds for every batch."""
        return self

    def round_seconds(self, batch: Floats, contexts: Floats) -> Floats:
        """Return the seconds of decode steps, elementwise.

        Args:
            batch: number of sequences.
            contexts: tokens in the contexts of all of them.
        """
        seconds: Floats = self.step_seconds + self.sequence_seconds * batch + self.context_seconds * contexts
        return seconds

    def sequence_work(self, context: float, tokens: float) -> float:
        """Return the seconds that a sequence adds to its batch while it grows by `tokens` from `context` tokens."""
        return self.sequence_seconds * tokens + self.context_seconds * tokens * (context + tokens / 2)


@dataclass(frozen=True)
class DecodeTable:
    """Seconds of a decode step on a grid of batch sizes and mean contexts, measured or computed."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    """[batches][contexts]"""
    prefill_token_seconds: float = 0.0
    """Seconds for each prompt token."""

    def linear(self) -> LinearLatency:
        """Return the linear model with the least relative error on the grid, each parameter at least 0.

        A drafted row is assumed to cost the arithmetic of a sequence.
        """
        rows = [
            (1.0, float(batch), float(batch * context), seconds)
            for batch, line in zip(self.batches, self.seconds, strict=True)
            for context, seconds in zip(self.contexts, line, strict=True)
        ]
        grid = np.array(rows)
        seconds = grid[:, 3]
        step, sequence, context = non_negative_least_squares(grid[:, :3] / seconds[:, None], np.ones(len(seconds)))
        return LinearLatency(step, sequence, context, self.prefill_token_seconds, sequence)


@dataclass(frozen=True)
class InstanceProfile:
    """Everything that a forecast needs about one kind of instance."""

    latency: Latency
    gpus: int
    """GPUs of an instance."""
    kv_tokens: int
    """Tokens that its KV cache holds."""
    startup_seconds: float
    """From asking for a warm pod to a ready server with weights of some version."""
    weight_load_seconds: float
    """To load the next version of the weights."""


def non_negative_least_squares(matrix: Floats, target: Floats) -> tuple[float, ...]:
    """Return the x ≥ 0 that minimises |matrix · x − target|, for a few columns: the best choice of free columns."""
    columns = matrix.shape[1]
    scale = np.sqrt((matrix * matrix).sum(axis=0))
    scale[scale == 0] = 1.0
    best, best_error = np.zeros(columns), float((target * target).sum())
    for size in range(1, columns + 1):
        for free in itertools.combinations(range(columns), size):
            chosen = list(free)
            solution = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], target, rcond=None)[0]
            if solution.min() < 0:
                continue
            residual = matrix[:, chosen] @ (solution / scale[chosen]) - target
            error = float(residual @ residual)
            if error < best_error * (1 - 1e-12):
                best_error = error
                best = np.zeros(columns)
                best[chosen] = solution / scale[chosen]
    return tuple(best.tolist())
