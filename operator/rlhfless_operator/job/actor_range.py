"""The numbers of generation and preparation instances that a step may use, where a job's document leaves them open."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfless_functions.api import Stage
from rlhfless_operator.job.spec import RLHFJobSpec

MOST_PREPARERS = 64
"""Most preparation instances of a step."""


@dataclass(frozen=True)
class ActorRange:
    """The fewest and the most instances of generation, or of another stage, that a step of a job may use."""

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


def preparer_range(
    spec: RLHFJobSpec, actors: ActorRange, gpus: Mapping[Stage, int], *, queued: bool = False
) -> ActorRange:
    """Return the range of preparation instances that the job sets; see `PreparerRange`.

    Args:
        actors: generation instances that a step may use. Without `preparation.instances.max`, those of preparation use
            no more GPUs than these.
        gpus: GPUs of an instance of each stage; none for a missing stage.
        queued: whether a queue sets quota aside for the most instances.
    """
    instances, each = spec.preparation.instances, gpus.get("preparation", 0)
    most, chooses = instances.set_aside, spec.planning.policy == "cost" and not queued
    if instances.max is None and each and spec.asynchronous is None and chooses:
        most = max(most, min(MOST_PREPARERS, actors.most * gpus.get("generation", 0) // each))
    return ActorRange(instances.min, most)
