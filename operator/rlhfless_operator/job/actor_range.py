"""The number of generation instances that a step may use. Only this module reads `generation.instances`."""

from dataclasses import dataclass

from rlhfless_operator.job.spec import RLHFJobSpec


@dataclass(frozen=True)
class ActorRange:
    """The fewest and the most generation instances that a step of a job may use."""

    least: int
    most: int

    def within(self, count: int) -> "ActorRange":
        """Return this range, with both ends lowered to `count`."""
        return ActorRange(min(self.least, count), min(self.most, count))


def actor_range(spec: RLHFJobSpec, there_is_room_for: int | None = None) -> ActorRange:
    """Return the range that the job sets. Without `generation.instances.max`, its upper end is the room that there is.

    If neither gives a number, a job gets one instance. This includes machines without GPUs: several instances would
    share the cores and each would hold the model, while one instance computes all sequences of a batch together on all
    cores.

    Args:
        there_is_room_for: instances that fit on the machine's GPUs, or into the job's pool or its namespace's quota;
            None if none of these sets a limit.
    """
    instances = spec.generation.instances
    most = instances.max if instances.max is not None else there_is_room_for or 1
    return ActorRange(instances.min, max(instances.min, most))
