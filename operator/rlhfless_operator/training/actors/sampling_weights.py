"""Which weights a rollout's requests sample with, and which requests are cut for newer ones (`async.newWeights`)."""

from collections.abc import Callable
from dataclasses import dataclass

from rlhfless_functions.api import WeightsReference


@dataclass(frozen=True)
class SamplingWeights:
    """The weights of one rollout.

    A request samples with one version from its beginning to its end. A switch ends a request and begins another.
    """

    begun: WeightsReference
    """What the rollout began with, as it is written down."""
    newest: Callable[[], WeightsReference] | None = None
    """The newest weights that are written down, if requests take those; otherwise all of them take `begun`."""
    newer_versions: int = 0
    """How many newer versions may be published while a request goes on, as far as is foreseen."""

    @property
    def now(self) -> WeightsReference:
        """What a request that begins now samples with. It is never older than what an earlier one had."""
        return self.newest() if self.newest is not None else self.begun

    @property
    def oldest_version(self) -> int | None:
        """The oldest version whose tokens a request keeps; None if it keeps tokens of its own version alone."""
        return self.begun.version if self.newest is not None else None
