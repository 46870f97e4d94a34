"""The current progress of a run, gathered from events."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rlhfless_functions.api import Event, Samples, Started


@dataclass
class LiveProgress:
    """The progress of the current step. The terminal view reads it a few times a second."""

    on_note: Callable[[str], None] = lambda note: None
    """Called with messages for people."""
    on_stage: Callable[[], None] = lambda: None
    """Called when a stage of a step begins or ends."""
    stage_name: str = "starting"
    step: int = 0
    actors: int = 0
    finished: int = 0
    samples: int = 0
    under_way: dict[tuple[str, int], str] = field(default_factory=dict)
    """Running stages by lane (a rollout or the learner) and step. An asynchronous job has several at once."""
    engine: str | None = None
    """The engine and why it was chosen."""

    def begin_step(self, step: int, samples: int, *, beside: bool = False) -> None:
        """Begin a step.

        Args:
            beside: whether samples of earlier steps are still generated: then the counts are of all of them.
        """
        if not beside:
            self.samples, self.finished = 0, 0
        self.step, self.samples = step, self.samples + samples

    def stage(self, name: str, *, step: int | None = None, actors: int | None = None) -> None:
        """Begin a stage of a step, or of the job."""
        self.stage_name = name
        if actors is not None:
            self.actors = actors
        if step is not None:
            self.under_way[_lane(name), step] = name
            self.on_stage()

    def over(self, name: str, step: int) -> None:
        """End a stage of a step that has no next one yet."""
        self.under_way.pop((_lane(name), step), None)
        if self.under_way:
            self.stage_name = next(reversed(self.under_way.values()))
        self.on_stage()

    @property
    def stages(self) -> list[tuple[str, int]]:
        """Running stages and their steps, in the order of a step."""
        found = [(name, step) for (_, step), name in self.under_way.items()]
        return sorted(found, key=lambda each: (each[0] == "learning", each[0] == "preparation", each[1]))

    @property
    def at_once(self) -> str:
        """Running stages if there are several, such as `generation 13 · learning 12`; otherwise empty."""
        return " · ".join(f"{name} {step}" for name, step in self.stages) if len(self.under_way) > 1 else ""

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


def _lane(stage: str) -> str:
    """Return the lane of a stage: `learner`, or `rollout`, which runs its stages one after the other."""
    return "learner" if stage == "learning" else "rollout"
