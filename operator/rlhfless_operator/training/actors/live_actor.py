"""One live actor: what it was given, and what its instance reports."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlhfless_functions.api import (
    DecodeCounts,
    NextWeights,
    Preload,
    Progress,
    SampleTask,
    Started,
    WeightsFetched,
    WeightsReference,
)
from rlhfless_operator.planner.moves.live_batches import Batch
from rlhfless_operator.planner.moves.live_sizes import Batches
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.training.actors.heard import Heard
from rlhfless_operator.training.actors.live_rollout import LiveRollout


@dataclass(eq=False)
class Share:
    """The samples of one rollout that an actor has."""

    rollout: LiveRollout
    samples: dict[Key, SampleTask] = field(default_factory=dict)
    """Unfinished samples."""
    leaves: bool = False
    """Whether it leaves the batch. Its samples wait again once its instance has published them."""


@dataclass(eq=False)
class LiveActor:
    """One live actor."""

    name: str
    request: LiveRequest | None = None
    """Its request, once it has an instance."""
    weights: WeightsReference | None = None
    """Weights that it was told to decode with last."""
    shares: dict[str, Share] = field(default_factory=dict)
    """Its shares, by sink."""
    takes_more: bool = True
    """Whether samples may still join it."""
    waiting: int = 0
    """Samples that wait for a place in its instance, as it reports."""
    away: int = 0
    """Samples that wait for their environments, as it reports. Others take their places meanwhile."""
    reported: int = 0
    """Samples in its instance that are not away, as it reports."""
    sent: int = 0
    """Samples that it was given so far."""
    received: int = 0
    """Samples that its instance has taken in so far, as it reports."""
    started: Started | None = None
    version: int = -1
    """Version that its instance reports to decode with."""
    prefetched: int | None = None
    """See `Progress.prefetched_version`."""
    announced: int = 0
    """Newest version that its instance was told of."""
    told_at: float | None = None
    """Time at which it was told of newer weights; None once it decodes with them."""
    decoding: DecodeCounts = field(default_factory=DecodeCounts)
    """Counts of its decoding so far."""
    fetched: WeightsFetched = field(default_factory=WeightsFetched)
    """Counts of what its request has fetched of weights so far."""
    heard: Heard | None = None
    """Reports since the last measurement."""
    heard_counts: DecodeCounts = field(default_factory=DecodeCounts)
    """Counts at the last measurement."""
    is_drained: bool = False
    """Whether its instance ended before it had finished any sample."""
    has_finished: bool = False
    """Whether it has finished any sample."""

    @property
    def is_able(self) -> bool:
        """Whether samples may join it now."""
        return self.request is not None and self.started is not None and self.takes_more

    @property
    def load(self) -> int:
        """Number of its unfinished samples."""
        return sum(len(share.samples) for share in self.shares.values())

    @property
    def present(self) -> Counter[int]:
        """Number of its unfinished samples of each version that are not away."""
        samples: Counter[int] = Counter()
        away = self.away
        for share in self.shares.values():
            # An instance does not say of which share they are.
            there = max(0, len(share.samples) - away)
            away -= len(share.samples) - there
            samples[share.rollout.weights.version] += there
        return samples

    @property
    def staying(self) -> list[Share]:
        """Its shares with unfinished samples that do not leave."""
        return [share for share in self.shares.values() if share.samples and not share.leaves]

    def batch(self, batches: Batches, room: int) -> Batch:
        """Return its batch.

        Args:
            room: how many samples it may have.
        """
        assert self.weights is not None
        staying = self.staying
        version = staying[0].rollout.weights.version if staying else self.weights.version
        # Samples that wait in an instance that has places are more than its memory holds.
        free = 0 if self.waiting else batches.free(self.busy, room, answers=self.received == self.sent)
        return Batch(version, sum(len(share.samples) for share in staying), free)

    @property
    def busy(self) -> int:
        """Number of places that are taken. An instance reports a finished sample before it is published."""
        return self.reported + self.sent - self.received

    def is_told(self, weights: WeightsReference, upcoming: list[NextWeights]) -> None:
        """Note the weights that it was told to decode with, and those that may follow."""
        self.weights, self.prefetched = weights, None
        self.announced = max((each.weights.version for each in upcoming), default=weights.version)

    def reports(self, event: Progress) -> None:
        """Note the places of its batch, and the weights that its instance has."""
        self.waiting, self.away = event.waiting - event.away, event.away
        self.prefetched, self.received = event.prefetched_version, event.received or 0
        self.reported = event.running + self.waiting

    def is_ready_for(self, weights: WeightsReference) -> bool:
        """Return whether it can go on with these weights without waiting for its instance to fetch them.

        True, too, if the instance cannot fetch weights while it decodes, or was not told of these and has all that it
        was told of.
        """
        return self.prefetched is None or self.prefetched >= min(weights.version, self.announced)


@dataclass(frozen=True)
class Weights:
    """The weights that live actors decode with."""

    upcoming: Callable[[WeightsReference], list[NextWeights]]
    """Returns the versions that may follow some weights."""
    source: Callable[[WeightsReference], NextWeights]
    """Returns where instances fetch weights."""
    preload: Callable[[WeightsReference], Preload]
    """Returns what a fresh instance loads."""
    on_use: Callable[[Started, int, int | None], None]
    """Called when an instance decodes with a version, with the bytes that it fetched, if it knows them."""


@contextmanager
def later(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Call something after so many seconds, unless the context ends before."""
    timer = asyncio.get_running_loop().call_later(seconds, call)
    try:
        yield
    finally:
        timer.cancel()
