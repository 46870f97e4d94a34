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


class PromptTrend:
    """A line through (logarithm of a prompt's tokens, logarithm of its responses' mean tokens)."""

    def __init__(self) -> None:
        self._mass = 0.0
        self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def observe(self, prompt_tokens: int, mean: float, fade: float) -> None:
        """Learn from a complete group.

        Args:
            mean: tokens of its responses that ended by themselves; a group without tokens says nothing.
            fade: factor in (0, 1] by which earlier groups count less from now on.
        """
        if prompt_tokens <= 0 or mean <= 0:
            return
        x, y = math.log(prompt_tokens), math.log(mean)
        self._mass = self._mass * fade + 1
        self._x = self._x * fade + x
        self._y = self._y * fade + y
        self._xx = self._xx * fade + x * x
        self._xy = self._xy * fade + x * y
        self._yy = self._yy * fade + y * y

    def factor(self, prompt_tokens: int) -> float:
        """Return the expected length of a prompt's responses over that of all; the mean of all factors is about 1."""
        slope, variance = self._line()
        if prompt_tokens <= 0 or slope == 0:
            return 1.0
        away = math.log(prompt_tokens) - self._x / self._mass
        most = _REACH * math.sqrt(variance)
        return math.exp(slope * min(most, max(-most, away)) - slope * slope * variance / 2)

    @property
    def variance(self) -> float:
        """Variance of the logarithm of responses' lengths that prompts' lengths explain."""
        slope, variance = self._line()
        return slope * slope * variance

    def _line(self) -> tuple[float, float]:
        """Return the line's slope, shrunk towards 0 by what chance would bring, and the variance over prompts."""
        mass = self._mass
        if mass <= 3:
            return 0.0, 0.0
        over_prompts = self._xx / mass - (self._x / mass) ** 2
        # What is left by rounding alone is no difference between prompts.
        if over_prompts <= 1e-9 * max(1.0, self._xx / mass):
            return 0.0, 0.0
        together = self._xy / mass - self._x * self._y / mass**2
        over_responses = self._yy / mass - (self._y / mass) ** 2
        slope = together / over_prompts
        unexplained = max(0.0, over_responses - slope * together)
        chance = unexplained / ((mass - 2) * over_prompts)
        return (slope * max(0.0, 1 - chance / slope**2) if slope else 0.0), over_prompts

    def state(self) -> list[float]:
        """Return all that `from_state` needs."""
        return [self._mass, self._x, self._y, self._xx, self._xy, self._yy]

    @classmethod
    def from_state(cls, state: Sequence[float]) -> Self:
        """Return the trend with this `state`."""
        trend = cls()
        trend._mass, trend._x, trend._y, trend._xx, trend._xy, trend._yy = map(float, state)
        return trend
