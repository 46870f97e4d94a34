"""The current progress of a run, gathered from events."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlhfless_functions.api import Event, Samples, Started

StageName = str


@dataclass
class LiveProgress:
    """The progress of the current step. The terminal view reads it a few times a second."""

    on_note: Callable[[str], None] = lambda note: None
    """Called with messages for people."""
    stage_name: str = "starting"
    stage_since: float = field(default_factory=time.monotonic)
    step: int = 0
    actors: int = 0
    finished: int = 0
    samples: int = 0
    engine: str | None = None
    """The engine and why it was chosen."""

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
        """Handle an event of an actor."""
        if isinstance(event, Samples):
            self.finished += len(event.samples)
        elif isinstance(event, Started) and event.engine not in (None, self.engine):
            self.engine = event.engine
            self.note(f"generation runs on {event.engine}")

    def note(self, text: str) -> None:
        """Pass on a message for people."""
        self.on_note(text)
