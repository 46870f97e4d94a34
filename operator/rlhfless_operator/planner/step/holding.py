"""Holding: instances and the learner stay for the whole step, where to let them go and start them again costs more."""

from collections.abc import Sequence
from dataclasses import dataclass

STEPS_OF_A_START = 8
"""Number of steps over which a start of held GPUs is charged: they stay for an unknown time."""


@dataclass(frozen=True, slots=True)
class Holding:
    """GPUs that keep an instance and the learner all the time, and start neither."""

    gpus: int
    """Number of GPUs that do so already, from the step before."""
    late_seconds: float
    """Seconds by which a step ends later if further GPUs begin to do so."""
    start_seconds: float
    """Seconds to start both on one GPU."""


@dataclass(frozen=True, slots=True)
class Staying:
    """The instances of a stage, as a step finds them, and the price of letting one go."""

    there: int
    """Number of them that are there already."""
    switch_seconds: float
    """Instance-seconds of letting one go and having another as it was."""
    price: float = 1.0
    """Price of a second of one, in GPU-seconds of generation."""

    def held(self, count: int) -> "Held":
        """Return so many of them, if they stay for a whole step."""
        return Held(count, max(0, count - self.there), self.switch_seconds, self.price)


@dataclass(frozen=True, slots=True)
class StagesHolding:
    """Instances of three stages that have GPUs of their own, and may all stay for a whole step."""

    generation: Staying
    preparation: Staying
    learning: Staying
    late_seconds: float = 0.0
    """Seconds by which a step begins later if generation's instances start for it: a start that is longer than the
    learning of the step before, which hides it."""

    def stay(self, seconds: float, actors: int, preparers: int, learners: int) -> tuple[float, float]:
        """Return the seconds and GPU-seconds of a step of `seconds` in which so many instances stay.

        Only generation's starts delay it.
        """
        held = [self.generation.held(actors), self.preparation.held(preparers), self.learning.held(learners)]
        return held_for(seconds, held, self.late_seconds if held[0].fresh else 0.0)


@dataclass(frozen=True, slots=True)
class Held:
    """GPUs, or instances of one stage, that stay for a whole step."""

    count: int
    fresh: int
    """Number of them that did not stay before, and have to start."""
    start_seconds: float
    """Seconds to start one of them."""
    price: float = 1.0
    """Price of a second of one, in GPU-seconds of generation."""


def held_for(seconds: float, held: Sequence[Held], late_seconds: float) -> tuple[float, float]:
    """Return the seconds and GPU-seconds of a step in which all of these stay.

    Those that have to start are charged a part of that start.

    Args:
        seconds: of the step if nothing has to start.
        late_seconds: seconds by which the step ends later if anything has to start.
    """
    fresh = any(each.fresh for each in held)
    end = seconds + (late_seconds / STEPS_OF_A_START if fresh else 0.0)
    paid = (each.price * (each.count * end + each.fresh * each.start_seconds / STEPS_OF_A_START) for each in held)
    return end, sum(paid)
