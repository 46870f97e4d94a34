"""How many generation instances a step may use, where the job runs: the one place that reads `generation.instances`."""

from dataclasses import dataclass

from rlhfless_operator.job.spec import RLHFJobSpec


@dataclass(frozen=True)
class ActorRange:
    """How many generation instances a step of a job may use."""

    least: int
    most: int

    def within(self, count: int) -> "ActorRange":
        """The same with no more than `count` at a time."""
        return ActorRange(min(self.least, count), min(self.most, count))

    def at_most(self, count: int) -> "ActorRange":
        """The same with no more than `count` at a time, where the least allows it."""
        return ActorRange(self.least, max(self.least, min(self.most, count)))


def actor_range(spec: RLHFJobSpec, there_is_room_for: int | None = None) -> ActorRange:
    """What a job says of its instances, and what there is where it says nothing.

    A job without `generation.instances.max` has one instance where nothing tells how much of a machine or a cluster is
    the job's. That is so on a machine without GPUs too: instances would share its cores, and each would hold the model,
    where one computes all sequences of a batch together on all cores.

    Args:
        there_is_room_for: instances that the machine's GPUs, the job's pool or its namespace's quota have room for;
            None where none of these tells.
    """
    instances = spec.generation.instances
    most = instances.max if instances.max is not None else there_is_room_for or 1
    return ActorRange(instances.min, max(instances.min, most))
