"""The reports of a request about its samples. The instances' speed is learnt from them."""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rlhfless_functions.api import DecodeCounts, SampleTask
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.training.actors.generated import Stretch


@dataclass
class Heard:
    """The reports of one request about its samples."""

    begun: dict[Key, int]
    """Response tokens of each sample when it came to the instance, or when this began."""
    held: Collection[Key] = ()
    """Samples that were decoded before this began."""
    tokens: dict[Key, int] = field(default_factory=dict)
    finished: int = 0
    decoding: DecodeCounts = field(default_factory=DecodeCounts)
    prefixes: Mapping[str, float] = field(default_factory=dict)
    """Counts of shared prefixes that it sent and fetched; see `GenerationResult.shared_prefixes`."""
    waited: float = 0.0
    """Seconds in which all of its samples waited for environments."""
    all_wait: bool = False
    """Whether it has ended because all of the samples that it had taken in wait for their environments."""
    first: float = math.inf
    last: float = -math.inf

    @property
    def is_begun(self) -> bool:
        """Whether it has reported anything."""
        return self.first < math.inf

    def now(self, tokens: dict[Key, int]) -> None:
        """Note the tokens that it has generated so far. The first report comes before it decodes anything."""
        self.tokens.update(tokens)
        self.last = time.monotonic()
        self.first = min(self.first, self.last)

    def stretch(self) -> Stretch | None:
        """Return the measured stretch of generation; None if the request has reported too little."""
        if self.last <= self.first or not self.tokens:
            return None
        return Stretch(
            {key: self.begun.get(key, 0) for key in self.tokens},
            self.tokens,
            self.last - self.first,
            self.decoding,
            fetched_tokens=self.prefixes.get("tokens_fetched", 0.0),
            waited_seconds=self.prefixes.get("seconds_waited", 0.0) + self.waited,
            held=self.held,
        )


def key_of(sample: SampleTask) -> Key:
    """Return the (prompt, index) of a sample."""
    return sample.prompt, sample.index
