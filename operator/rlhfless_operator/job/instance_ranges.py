"""The numbers of instances that the stages of a step may use."""

from pydantic import Field

from rlhfless_functions.settings import Settings


class InstanceRange(Settings):
    """Number of generation instances that a step may use."""

    min: int = Field(default=1, ge=1)
    """Fewest instances of a step."""
    max: int | None = Field(default=None, ge=1)
    """Most instances of a step. By default as many as fit on the GPUs: with `rlhfless run` on those of the machine, on
    a cluster on those of the job's pool, and within the namespace's quota next to the other stages. If none of these
    sets a limit, one instance. That includes a machine without GPUs, where one instance uses the cores best."""


class PreparerRange(Settings):
    """Number of instances that may prepare a step's groups. Each prepares other groups, and what it computes does not
    depend on the number."""

    min: int = Field(default=1, ge=1, le=64)
    """Fewest instances of a step."""
    max: int | None = Field(default=None, ge=1, le=64)
    """Most instances of a step. With `planning.policy: cost` and a smaller `min`, the plan chooses the number from the
    times that earlier steps took. By default as many as fit on the GPUs of the step's generation instances, at most 64.
    Some jobs have `min` by default: asynchronous ones and those in a queue of Kueue, for which GPUs or quota are set
    aside, those with another policy, and those whose preparation has no GPUs."""

    @property
    def set_aside(self) -> int:
        """Number of instances for which GPUs or quota are set aside: the most, or the fewest if no most is named."""
        return self.max or self.min


class LearnerRange(Settings):
    """Number of instances that may take a learning step together. Each runs `processes`, and holds a part of the
    weights, the gradients and the optimizer's state."""

    min: int = Field(default=1, ge=1, le=64)
    """Fewest instances of a step; it does not run with fewer."""
    max: int = Field(default=1, ge=1, le=64)
    """Most instances of a step. If an instance is lost or does not start, the step runs with fewer, and the job
    requests the most again after the next checkpoint. With `planning.policy: cost` and a smaller `min`, the plan
    chooses the number from the times that steps took with different numbers. A different number changes the weights by
    about 1e-6 a step. It must be 1 in a rehearsal, and where pods use GPUs in turns (`deviceClass`)."""
