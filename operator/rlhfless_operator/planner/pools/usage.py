"""GPU-seconds that a job has had lately: what is longer ago counts less."""

_HALF_LIFE_SECONDS = 1800.0
"""Use of GPUs counts half after this time."""


class RecentUse:
    """What one job has had.

    Args:
        now: monotonic seconds.
        seconds: GPU-seconds that it begins with.
    """

    def __init__(self, now: float, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._at = now

    def charge(self, gpus: int, now: float) -> float:
        """GPU-seconds until now, where the job has had so many GPUs since the last call."""
        elapsed, self._at = now - self._at, now
        self._seconds = self._seconds * 0.5 ** (elapsed / _HALF_LIFE_SECONDS) + elapsed * gpus
        return self._seconds
