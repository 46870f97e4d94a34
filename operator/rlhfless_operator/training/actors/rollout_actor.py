"""One actor of a rollout that has actors of its own: its samples, and its present request."""

from collections.abc import Collection
from dataclasses import dataclass, field

from rlhfless_functions.api import SampleTask
from rlhfless_operator.planner.moves.migration import Key, Move
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.training.actors.heard import Heard, key_of


@dataclass(eq=False)
class RolloutActor:
    """One generation worker of a rollout."""

    number: int
    samples: list[SampleTask]
    """Samples in the order of admission. Finished ones may still be among them."""
    request: LiveRequest | None = None
    """Its request, while samples may join it."""
    sink: str = ""
    """Sink of its last request."""
    heard: Heard = field(default_factory=lambda: Heard({}))
    """Reports of that request."""
    has_instance: bool = False
    """Whether it has an instance. It keeps the instance until it has nothing left."""
    attempts: int = 0
    failures: int = 0
    """Losses in a row without a finished sample in between."""
    all_wait: bool = False
    """Whether its last request ended because all of its samples wait for their environments, and none is coming."""
    moves: list[Move] = field(default_factory=list)
    """Moves of its samples, which are made once its instance has published them."""
    expected: int = 0
    """Number of moves that will bring it samples."""
    sent: int = 0
    """Samples that its request was given so far."""
    joins_since: float | None = None
    """Time at which a move to it was decided, until its instance has taken the samples in."""

    @property
    def name(self) -> str:
        """Name of the actor in requests and sinks."""
        return f"actor-{self.number:04d}"

    def keep_unfinished(self, finished: Collection[Key]) -> bool:
        """Forget the samples that are finished. Return whether any is left."""
        self.samples = [sample for sample in self.samples if key_of(sample) not in finished]
        return bool(self.samples)

    def give(self, keys: Collection[Key]) -> list[SampleTask]:
        """Take these samples from it, and return them."""
        given = [sample for sample in self.samples if key_of(sample) in keys]
        self.samples = [sample for sample in self.samples if key_of(sample) not in keys]
        return given

    def end(self) -> None:
        """Let no more samples join its request, which ends once it has none left."""
        if self.request is not None:
            self.request.end()
            self.request = None
