"""The GPUs that the stages of a job use in turns, and the room on them beside the stages at work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Stage = Literal["generation", "preparation", "learning"]


@dataclass(frozen=True)
class SharedGpus:
    """GPUs of a job whose stages cannot all have theirs at once."""

    count: int
    per_instance: Mapping[Stage, int]
    """GPUs of an instance of each stage; none for a missing stage."""

    def has_room(self, stage: Stage, working: Mapping[Stage, int]) -> bool:
        """Return whether one more instance of a stage has GPUs beside so many of each stage at work."""
        return self.used(working) + self.per_instance.get(stage, 0) <= self.count

    def used(self, working: Mapping[Stage, int]) -> int:
        """Return the GPUs of so many instances of each stage."""
        return sum(self.per_instance.get(each, 0) * count for each, count in working.items())

    def actors_beside(self, working: Mapping[Stage, int]) -> int:
        """Return the most actors that have GPUs beside so many instances of other stages; 0 if these have none."""
        each = self.per_instance.get("generation", 0)
        left = self.count - self.used(working)
        return max(0, left // each if each else left)
