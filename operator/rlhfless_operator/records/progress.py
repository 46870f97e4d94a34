"""What is going on right now, for whoever looks: gathered from events, never asked for."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlhfless_functions.api import Event, Samples, Started

StageName = str


@dataclass
class LiveProgress:
    """The current step as it goes. The terminal view reads it a few times a second."""

    on_note: Callable[[str], None] = lambda note: None
    """Told of what a person should know."""
    stage_name: str = "starting"
    stage_since: float = field(default_factory=time.monotonic)
    step: int = 0
    actors: int = 0
    finished: int = 0
    samples: int = 0
    engine: str | None = None
    """What generates, and why."""

    def begin_step(self, step: int, samples: int, *, beside: bool = False) -> None:
        """A step begins.

        Args:
            beside: whether samples of earlier steps are still generated: then the counts are of all of them.
        """
        if not beside:
            self.samples, self.finished = 0, 0
        self.step, self.samples = step, self.samples + samples

    def stage(self, name: str, *, actors: int | None = None) -> None:
        """A stage begins."""
        self.stage_name, self.stage_since = name, time.monotonic()
        if actors is not None:
            self.actors = actors

    def event(self, event: Event) -> None:
        """An actor said something."""
        if isinstance(event, Samples):
            self.finished += len(event.samples)
        elif isinstance(event, Started) and event.engine not in (None, self.engine):
            self.engine = event.engine
            self.note(f"generation runs on {event.engine}")

    def note(self, text: str) -> None:
        """Something that a person should know."""
        self.on_note(text)
