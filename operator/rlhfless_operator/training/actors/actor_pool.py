"""The actors of one step, and what their requests say."""

import asyncio
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlhfless_functions.api import DecodeCounts, SampleTask, WeightsReference
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.training.actors.generated import Stretch


@dataclass
class Actor:
    """One generation worker of a step: a share of samples, and the request that is under way for it."""

    number: int
    samples: list[SampleTask]
    """What it holds, in the order of admission; those that are finished are still among them."""
    request: asyncio.Task[bool] | None = None
    has_instance: bool = False
    """Whether its turn has come; from then on until it has nothing left."""
    attempts: int = 0
    failures: int = 0
    """Losses in a row without a sample finished in between."""
    cut_at: float | None = None
    """When its request was cut by choice; None once it goes on."""
    weights: WeightsReference | None = None
    """What its newest request samples with; None before its first one."""
    has_switched: bool = False
    """Whether the request before that one sampled with older weights."""
    prefetched_version: int | None = None
    """The newest version that its instance is ready for, as it says itself; see `Progress.prefetched_version`."""
    last_announced: int = 0
    """The newest version that its request has told the instance of."""

    @property
    def name(self) -> str:
        """The name that requests and sinks know it by."""
        return f"actor-{self.number:04d}"

    def takes(self, weights: WeightsReference) -> None:
        """Its next request samples with these weights."""
        self.has_switched = self.weights is not None and self.weights != weights
        self.weights = weights
        self.prefetched_version = None

    def is_ready_for(self, weights: WeightsReference) -> bool:
        """Whether there is no reason to wait with these weights: its instance has them, cannot fetch them while it
        decodes, or was not told of them and has all that it was told of."""
        if self.prefetched_version is None:
            return True
        return self.prefetched_version >= min(weights.version, self.last_announced)

    def keep_unfinished(self, finished: Collection[Key]) -> None:
        """Forget the samples that are finished."""
        self.samples = [sample for sample in self.samples if key_of(sample) not in finished]

    def give(self, keys: Collection[Key], other: "Actor") -> None:
        """Hand some of its samples to another actor."""
        other.samples += [sample for sample in self.samples if key_of(sample) in keys]
        self.samples = [sample for sample in self.samples if key_of(sample) not in keys]


class ActorPool:
    """The actors that have anything left, by name. Numbers are never used twice."""

    def __init__(self) -> None:
        self._actors: dict[str, Actor] = {}
        self._opened = 0

    def open(self, samples: Sequence[SampleTask]) -> Actor:
        """A new actor with these samples."""
        actor = Actor(self._opened, list(samples))
        self._opened += 1
        self._actors[actor.name] = actor
        return actor

    def release(self, actor: Actor) -> None:
        """An actor has nothing left."""
        del self._actors[actor.name]

    def __getitem__(self, name: str) -> Actor:
        return self._actors[name]

    def __iter__(self) -> Iterator[Actor]:
        return iter(list(self._actors.values()))

    def __len__(self) -> int:
        return len(self._actors)


@dataclass
class Heard:
    """What one request has said of its samples."""

    begun: dict[Key, int]
    """Response tokens that each sample had when the request began."""
    tokens: dict[Key, int] = field(default_factory=dict)
    finished: int = 0
    decoding: DecodeCounts = field(default_factory=DecodeCounts)
    prefixes: Mapping[str, float] = field(default_factory=dict)
    """What it has sent and fetched of shared prefixes; see `GenerationResult.shared_prefixes`."""
    first: float = math.inf
    last: float = -math.inf

    def now(self, tokens: dict[Key, int]) -> None:
        """It generates, and has come so far: the first time, before it has decoded anything."""
        self.tokens.update(tokens)
        self.last = time.monotonic()
        self.first = min(self.first, self.last)

    def stretch(self) -> Stretch | None:
        """What its speed can be learnt from; None if it said too little."""
        if self.last <= self.first or not self.tokens:
            return None
        return Stretch(
            {key: self.begun.get(key, 0) for key in self.tokens},
            self.tokens,
            self.last - self.first,
            self.decoding,
            fetched_tokens=self.prefixes.get("tokens_fetched", 0.0),
            waited_seconds=self.prefixes.get("seconds_waited", 0.0),
        )


def key_of(sample: SampleTask) -> Key:
    """The (prompt, index) of a sample."""
    return sample.prompt, sample.index
