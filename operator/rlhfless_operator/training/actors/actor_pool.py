"""The actors of one step, and the reports of their requests."""

import asyncio
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlhfless_functions.api import DecodeCounts, SampleTask
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.training.actors.generated import Stretch


@dataclass
class Actor:
    """One generation worker of a step: its share of the samples, and its current request."""

    number: int
    samples: list[SampleTask]
    """Samples in the order of admission. Finished ones may still be among them."""
    request: asyncio.Task[bool] | None = None
    has_instance: bool = False
    """Whether it has an instance. It keeps the instance until it has nothing left."""
    attempts: int = 0
    failures: int = 0
    """Losses in a row without a finished sample in between."""
    all_wait: bool = False
    """Whether its last request ended because all of its samples wait for their environments."""
    cut_at: float | None = None
    """Time at which its request was cut by choice; None once it has resumed."""

    @property
    def name(self) -> str:
        """Name of the actor in requests and sinks."""
        return f"actor-{self.number:04d}"

    def keep_unfinished(self, finished: Collection[Key]) -> None:
        """Forget the samples that are finished."""
        self.samples = [sample for sample in self.samples if key_of(sample) not in finished]

    def give(self, keys: Collection[Key], other: "Actor") -> None:
        """Hand some of its samples to another actor."""
        other.samples += [sample for sample in self.samples if key_of(sample) in keys]
        self.samples = [sample for sample in self.samples if key_of(sample) not in keys]


class ActorPool:
    """The actors that have samples left, by name. Numbers are never used twice."""

    def __init__(self) -> None:
        self._actors: dict[str, Actor] = {}
        self._opened = 0

    def open(self, samples: Sequence[SampleTask]) -> Actor:
        """Add an actor with these samples."""
        actor = Actor(self._opened, list(samples))
        self._opened += 1
        self._actors[actor.name] = actor
        return actor

    def release(self, actor: Actor) -> None:
        """Remove an actor that has nothing left."""
        del self._actors[actor.name]

    def __getitem__(self, name: str) -> Actor:
        return self._actors[name]

    def __iter__(self) -> Iterator[Actor]:
        return iter(list(self._actors.values()))

    def __len__(self) -> int:
        return len(self._actors)


@dataclass
class Heard:
    """The reports of one request about its samples."""

    begun: dict[Key, int]
    """Response tokens of each sample at the start of the request."""
    tokens: dict[Key, int] = field(default_factory=dict)
    finished: int = 0
    decoding: DecodeCounts = field(default_factory=DecodeCounts)
    prefixes: Mapping[str, float] = field(default_factory=dict)
    """Counts of shared prefixes that it sent and fetched; see `GenerationResult.shared_prefixes`."""
    waited: float = 0.0
    """Seconds in which all of its samples waited for environments."""
    first: float = math.inf
    last: float = -math.inf

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
        )


def key_of(sample: SampleTask) -> Key:
    """Return the (prompt, index) of a sample."""
    return sample.prompt, sample.index
