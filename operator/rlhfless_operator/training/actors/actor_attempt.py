"""One request that an actor makes."""

from dataclasses import dataclass

from rlhfless_functions.api import SampleTask, WeightsReference


@dataclass(frozen=True)
class ActorAttempt:
    """What an actor asks of an instance, once."""

    actor: str
    """Its name."""
    number: int
    """How many attempts it had before."""
    weights: WeightsReference
    """What it samples with."""
    samples: list[SampleTask]
    """What it has left, in the order of admission."""
    sink: str
    """Folder that its rollout parts go to."""
    resume_from: list[str]
    """Sinks and parts in which earlier requests may have left something of its samples."""
    known_until: dict[str, str]
    """The newest part of each of these sinks that was announced."""
