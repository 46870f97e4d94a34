"""The trend of response lengths over prompt lengths: what the prompt alone says of its responses, learnt online.

Most prompts are visited once or twice, so most plans are made of prompts without a past. A longer prompt often asks for
a longer response. How much longer differs by task and changes in training, so the trend is a line in logarithms through
the groups of the newest steps, and counts only as far as it exceeds chance (James and Stein, 1961).
"""

import math
from collections.abc import Sequence
from typing import Self

_REACH = 3.0
"""Standard deviations of the prompts' lengths beyond which the line is not drawn out further."""
_MOST_LOG = math.log(8.0)
"""Logarithm of the largest factor, either way."""


class PromptTrend:
    """A line through (logarithm of a prompt's tokens, logarithm of its responses' mean tokens)."""

    def __init__(self) -> None:
        self._mass = 0.0
        self._x = self._y = 0.0
        """Means."""
        self._xx = self._xy = self._yy = 0.0
        """Sums of products of the distances from the means."""

    def observe(self, prompt_tokens: int, mean: float, fade: float) -> None:
        """Learn from a complete group.

        Args:
            mean: tokens of its responses that ended by themselves; a group without tokens says nothing.
            fade: factor in (0, 1] by which earlier groups count less from now on.
        """
        if prompt_tokens <= 0 or mean <= 0:
            return
        x, y = math.log(prompt_tokens), math.log(mean)
        # West's incremental form (1979) loses no digits.
        self._mass = self._mass * fade + 1
        away_x, away_y = x - self._x, y - self._y
        self._x += away_x / self._mass
        self._y += away_y / self._mass
        self._xx = self._xx * fade + away_x * (x - self._x)
        self._xy = self._xy * fade + away_x * (y - self._y)
        self._yy = self._yy * fade + away_y * (y - self._y)

    def factor(self, prompt_tokens: int) -> float:
        """Return the expected length of a prompt's responses over that of all; the mean of all factors is about 1."""
        slope, variance = self._line()
        if prompt_tokens <= 0 or slope == 0:
            return 1.0
        most = _REACH * math.sqrt(variance)
        away = min(most, max(-most, math.log(prompt_tokens) - self._x))
        return math.exp(min(_MOST_LOG, max(-_MOST_LOG, slope * away - slope * slope * variance / 2)))

    @property
    def variance(self) -> float:
        """Variance of the logarithm of responses' lengths that prompts' lengths explain."""
        slope, variance = self._line()
        return slope * slope * variance

    def _line(self) -> tuple[float, float]:
        """Return the line's slope, shrunk towards 0 by what chance would bring, and the variance over prompts."""
        # Less than this is rounding, and no difference between prompts.
        if self._mass <= 3 or self._xx <= 1e-9:
            return 0.0, 0.0
        slope = self._xy / self._xx
        unexplained = max(0.0, self._yy - slope * self._xy)
        chance = unexplained / ((self._mass - 2) * self._xx)
        signal = 1 - chance / slope**2 if slope**2 > 0 else 0.0
        return slope * max(0.0, signal), self._xx / self._mass

    def state(self) -> list[float]:
        """Return all that `from_state` needs."""
        return [self._mass, self._x, self._y, self._xx, self._xy, self._yy]

    @classmethod
    def from_state(cls, state: Sequence[float]) -> Self:
        """Return the trend with this `state`."""
        trend = cls()
        trend._mass, trend._x, trend._y, trend._xx, trend._xy, trend._yy = map(float, state)
        return trend
