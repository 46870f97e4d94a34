"""The seconds of a pass by its rows, learnt from earlier passes, and the number of drafted rows that pays."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

PRIOR_ROWS = {"cpu": 24.0, "cuda": 512.0}
"""Number of rows that take as long as the fixed part of a pass, until that has been measured. On a CPU 21 to 25 were
found, for models of 0.3 and 26 million parameters."""
PRIOR_DRAFTED = 0.25
"""Assumed cost of drafting per pass and per drafted row, as a share of their own cost, until it is measured."""
_FORGET = 0.98
_PRIOR_WEIGHT = 0.001
"""Weight of the prior relative to the measured passes. It decides what they can't tell apart."""
_FIT_EVERY = 4
_SURPRISE = 1.3
"""Bound on how far a pass may differ from its expected time, as a factor. Passes beyond it count as if they were at
it."""


class PassCosts:
    """Seconds of a pass: a + c · rows, and with drafts another e + f · drafted rows.

    The four numbers are fitted by least squares over the newest passes. They outlive runs.

    Args:
        device: type of the device.
    """

    def __init__(self, device: str) -> None:
        rows = PRIOR_ROWS[device]
        self._shape = np.array([rows, 1.0, PRIOR_DRAFTED * rows, PRIOR_DRAFTED])
        self._products = np.zeros((4, 4))
        self._targets = np.zeros(4)
        self._passes = 0
        self._fitted = self._shape

    def measured(self, rows: int, drafted: int, seconds: float) -> None:
        """Learn from a pass.

        Args:
            rows: rows that it computed, padding included.
            drafted: rows among them for drafts.
            seconds: its time, drafting on the host included.
        """
        if self._passes > 8:
            # The time that other processes take is not a property of the pass.
            expected = self.seconds(rows, drafted)
            seconds = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
        features = np.array([1.0, rows, drafted > 0, drafted])
        # Relative errors count: a pass of few rows says as much as one of many.
        weight = 1 / seconds**2
        self._products = _FORGET * self._products + weight * np.outer(features, features)
        self._targets = _FORGET * self._targets + weight * seconds * features
        self._passes += 1
        if self._passes % _FIT_EVERY == 1:
            self._fitted = self._fit()

    def seconds(self, rows: int, drafted: int = 0) -> float:
        """Return the seconds of a pass, in arbitrary units before one has been measured."""
        fixed, row, drafting, draft = self._fitted.tolist()
        return float(fixed + row * rows + (drafting + draft * drafted if drafted else 0.0))

    def _fit(self) -> NDArray[np.float64]:
        # The unknowns are in units of the prior's shape, scaled to the measured passes, so each is about 1.
        products = self._products * np.outer(self._shape, self._shape)
        targets = self._targets * self._shape
        scale = targets.sum() / products.sum()
        anchor = _PRIOR_WEIGHT * np.trace(products) * np.eye(4)
        solution = np.linalg.solve(products + anchor, targets + anchor @ np.full(4, scale))
        return np.maximum(solution, 0.0) * self._shape


def worthwhile(
    chances: NDArray[np.float64], sequences: int, rows: int, padded: Callable[[int], int], most: int, costs: PassCosts
) -> int:
    """Return the number of drafted tokens that gives the most tokens a second. The likeliest are drafted first, and
    rows that only pad a pass are free.

    Args:
        chances: [drafts] chance that each is kept, greatest first.
        sequences: number of sequences. Each gets a token anyway.
        rows: rows of the pass without drafts.
        padded: returns the rows that a pass computes, given those that it needs.
        most: most rows of a pass.
        costs: costs of passes.
    """
    least = padded(rows)
    sizes = np.arange(least, max(least, padded(min(most, rows + len(chances)))) + 1, padded(1))
    kept = np.concatenate([[0.0], np.cumsum(chances)])
    counts = np.minimum(sizes - rows, len(chances))
    rates = [
        (sequences + float(kept[count])) / costs.seconds(size, size - rows)
        for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)
    ]
    best = int(np.argmax(rates))
    return int(counts[best]) if rates[best] > sequences / costs.seconds(least) else 0


def best_width(chances: NDArray[np.float64], sequences: int, widths: Sequence[int], most: int, costs: PassCosts) -> int:
    """Return the number of rows of a sequence that gives the most tokens a second, where all have equally many.

    Args:
        chances: [sequences with drafts, tokens] chance that each token is kept.
        sequences: number of sequences. Each gets a token anyway.
        widths: numbers of rows to choose from, smallest first; the first is 1.
        most: most rows of a pass.
        costs: costs of passes.
    """

    def rate(width: int) -> float:
        rows = sequences * width
        return (sequences + float(chances[:, : width - 1].sum())) / costs.seconds(rows, rows - sequences)

    return max((width for width in widths if width == 1 or sequences * width <= most), key=rate)
