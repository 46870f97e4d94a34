"""How long an instance takes: the linear model that plans are made with, and the tables that it is fitted to."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Latency(Protocol):
    """How long rounds take, in each of which every sequence of a batch gains a token.

    Without drafts a round is a decode step, and linear (`LinearLatency`). With them it is the least of a few linear
    models (`drafting.DraftedLatency`).
    """

    @property
    def lines(self) -> Sequence["LinearLatency"]:
        """The linear models of which the least holds."""

    @property
    def tokens(self) -> Sequence[float]:
        """[lines] Tokens that a sequence gains in a decode step, on average."""

    @property
    def prefill_token_seconds(self) -> float:
        """Seconds for each prompt token."""

    def at(self, batch: float, context: float) -> "LinearLatency":
        """The linear model that holds for `batch` sequences with a mean context of `context` tokens."""

    def decode_seconds(self, batch: int, context: float) -> float:
        """Seconds of one round of `batch` sequences with a mean context of `context` tokens."""

    def round_seconds(self, batch: Floats, contexts: Floats) -> Floats:
        """Seconds of rounds, elementwise, by sequences and by the tokens in the contexts of all of them."""


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

    def decode_seconds(self, batch: int, context: float) -> float:
        """Seconds of one decode step of `batch` sequences with a mean context of `context` tokens."""
        return self.step_seconds + batch * (self.sequence_seconds + self.context_seconds * context)

    @property
    def lines(self) -> tuple["LinearLatency", ...]:
        """Itself: see `DraftedLatency`."""
        return (self,)

    @property
    def tokens(self) -> tuple[float, ...]:
        """A sequence gains one in a decode step."""
        return (1.0,)

    def at(self, batch: float, context: float) -> "LinearLatency":
        """The linear model that holds for such a batch: itself."""
        return self

    def round_seconds(self, batch: Floats, contexts: Floats) -> Floats:
        """Seconds of decode steps, elementwise.

        Args:
            batch: sequences.
            contexts: tokens in the contexts of all of them.
        """
        seconds: Floats = self.step_seconds + self.sequence_seconds * batch + self.context_seconds * contexts
        return seconds

    def sequence_work(self, context: float, tokens: float) -> float:
        """Seconds that a sequence adds to its batch while it grows by `tokens` from a context of `context` tokens."""
        return self.sequence_seconds * tokens + self.context_seconds * tokens * (context + tokens / 2)


@dataclass(frozen=True)
class DecodeTable:
    """Seconds of a decode step on a grid of batch sizes and mean contexts, as measured or as computed."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    """[batches][contexts]"""
    prefill_token_seconds: float = 0.0
    """Seconds for each prompt token."""

    def linear(self) -> LinearLatency:
        """The linear model with the least relative error on the grid, each parameter at least 0.

        A drafted row is taken to cost the arithmetic that a sequence does.
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
    """Everything that a forecast has to know of one kind of instance."""

    latency: Latency
    gpus: int
    """GPUs of an instance."""
    kv_tokens: int
    """Tokens that its KV cache holds."""
    startup_seconds: float
    """From asking for a warm pod to a ready server with weights of some version."""
    weight_load_seconds: float
    """Loading the next weights version."""


def non_negative_least_squares(matrix: Floats, target: Floats) -> tuple[float, ...]:
    """The x ≥ 0 that minimises |matrix · x − target|, for a few columns: the best of all choices of free columns."""
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
