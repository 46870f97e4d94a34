"""The GPUs that the stages of a job use in turns, and the room on them beside the stages at work."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfless_functions.api import Stage


@dataclass(frozen=True)
class SharedGpus:
    """GPUs of a job whose stages cannot all have theirs at once."""

    count: int
    per_instance: Mapping[Stage, int]
    """GPUs of an instance of each stage; none for a missing stage."""

    def has_room(self, stage: Stage, working: Mapping[Stage, int]) -> bool:
        """Return whether one more instance of a stage has GPUs beside so many of each stage at work."""
        used = sum(self.per_instance.get(each, 0) * count for each, count in working.items())
        return used + self.per_instance.get(stage, 0) <= self.count
