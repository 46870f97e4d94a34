"""A sum over time in which earlier amounts count less."""

USE_HALF_LIFE_SECONDS = 1800.0
"""Time after which a job's use of GPUs counts half."""


class DecayedSum:
    """A sum whose terms count half after each half-life.

    Args:
        half_life: seconds.
        now: monotonic seconds.
        value: the sum to begin with.
    """

    def __init__(self, half_life: float, now: float, value: float = 0.0) -> None:
        self._half_life = half_life
        self._at = now
        self._value = value

    def add(self, rate: float, now: float) -> float:
        """Add `rate`, such as a job's number of GPUs, for each second since the last call, and return the sum."""
        elapsed, self._at = max(0.0, now - self._at), max(self._at, now)
        self._value = self._value * 0.5 ** (elapsed / self._half_life) + elapsed * rate
        return self._value
