"""The history of a job: the newest values under each name, such as the seconds of earlier steps."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean

from rlhfless_operator.planner.warming import WINDOW


class History:
    """The newest `WINDOW` values under each name; part of a checkpoint."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Remember a value."""
        self._values.setdefault(name, deque(maxlen=WINDOW)).append(value)

    def recent(self, name: str) -> list[float]:
        """Return the values under a name, oldest first."""
        return list(self._values.get(name, ()))

    def mean(self, name: str, default: float = 0.0) -> float:
        """Return the mean of the values under a name, or `default` if there are none."""
        values = self._values.get(name)
        return fmean(values) if values else default

    def state(self) -> dict[str, list[float]]:
        """Return everything that `restore` needs, as JSON values."""
        return {name: list(values) for name, values in sorted(self._values.items())}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Put the values of an earlier `state` before those added since."""
        for name, values in state.items():
            self._values[name] = deque([*map(float, values), *self.recent(name)], maxlen=WINDOW)
