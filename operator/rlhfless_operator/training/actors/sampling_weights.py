"""The weights that a rollout's requests sample with (`async.newWeights`)."""

from collections.abc import Callable
from dataclasses import dataclass

from rlhfless_functions.api import WeightsReference


@dataclass(frozen=True)
class SamplingWeights:
    """The weights of one rollout."""

    begun: WeightsReference
    """Recorded weights at the start of the rollout."""
    newest: Callable[[], WeightsReference] | None = None
    """Returns the newest recorded weights, if requests may switch to them. Without it all requests use `begun`."""

    @property
    def now(self) -> WeightsReference:
        """Weights of a request that begins now. They are never older than those of an earlier one."""
        return self.newest() if self.newest is not None else self.begun

    @property
    def oldest_version(self) -> int | None:
        """Oldest version whose tokens a request keeps; None if it keeps only tokens of its own version."""
        return self.begun.version if self.newest is not None else None
