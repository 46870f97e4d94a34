"""One request that an actor makes."""

from dataclasses import dataclass

from rlhfless_functions.api import SampleTask, Shelter, WeightsReference


@dataclass(frozen=True)
class ActorAttempt:
    """One request of an actor to an instance."""

    actor: str
    """Name of the actor."""
    number: int
    """Number of attempts before this one."""
    weights: WeightsReference
    """Weights that the request samples with."""
    samples: list[SampleTask]
    """Unfinished samples, in the order of admission."""
    sink: str
    """Folder that receives the rollout parts."""
    resume_from: list[str]
    """Sinks and parts that may hold tokens of these samples from earlier requests."""
    known_until: dict[str, str]
    """Newest announced part of each of these sinks."""
    shelter: Shelter | None = None
    """The process that has the environments of these samples; None if the instance has them."""
