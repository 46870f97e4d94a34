"""The division of this machine's GPUs among a job's stages: GPUs per instance, and whether stages take turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfless_functions.api import Stage
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.actor_range import ActorRange, actor_range, preparer_range
from rlhfless_operator.job.instance_gpus import gpus_of, instance_gpus, needed_gpus
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.training.requests.builder import RequestBuilder


class TooFewGpusError(UserError):
    """An instance of the job needs more GPUs than the machine has."""


@dataclass(frozen=True)
class GpuAssignment:
    """The share of each of a job's instances in the machine's GPUs."""

    actors: ActorRange
    """Number of generation instances that a step may use."""
    preparers: ActorRange
    """Number of preparation instances that a step may use."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs, as in CUDA_VISIBLE_DEVICES."""
    per_instance: Mapping[Stage, int] | None = None
    """GPUs of an instance of each stage; None without GPUs."""
    shared: SharedGpus | None = None
    """The GPUs where stages take turns, because there are too few for all stages at once."""


def assign_gpus(job: RLHFJob, requests: RequestBuilder, gpus: Sequence[str]) -> GpuAssignment:
    """Divide the GPUs, and limit the generation instances to those that can have GPUs at once.

    An instance of preparation has a GPU if a model computes there (the policy, a reference, a critic or a reward
    model), or if the job gives its pods one, for reward code that uses it.

    Raises:
        TooFewGpusError: one instance needs more GPUs than the machine has.
    """
    spec = job.spec
    if not gpus:
        actors = actor_range(spec)
        # A rehearsal has as many emulated GPUs as it asks for.
        emulated: Mapping[Stage, int] = instance_gpus(spec) if spec.rehearsal is not None else {}
        return GpuAssignment(actors, preparer_range(spec, actors, emulated))
    needed, learners = needed_gpus(spec), spec.learning.instances.max
    generating, learning = needed["generation"], needed["learning"]
    computes = (
        requests.passes.preparation_computes
        or any(reward.model is not None for reward in spec.all_rewards)
        or gpus_of(spec.preparation.pods) > 0
    )
    preparing = int(computes) * spec.preparation.instances.set_aside
    for count, field in (
        (generating, "generation.vllm.tensorParallelSize"),
        (learning, "learning.processes"),
        (learning * learners, "learning.instances.max times learning.processes"),
        (preparing, "preparation.instances.max"),
    ):
        if count > len(gpus):
            raise TooFewGpusError(
                f"{field} is {count}, but this machine has {len(gpus)} GPUs ({', '.join(gpus)}); lower it, or make"
                f" more visible with CUDA_VISIBLE_DEVICES"
            )
    per_instance: dict[Stage, int] = {
        "generation": generating,
        "preparation": int(computes),
        "learning": learning,
    }
    others = preparing + learning * learners
    room = len(gpus) // generating
    fewer = "lower preparation.instances.max, " if preparing > 1 else ""
    if spec.asynchronous is not None:
        room = (len(gpus) - others) // generating
        if room < 1:
            raise TooFewGpusError(
                f"async generates while it learns, which needs {generating + others} GPUs at once, but this machine has"
                f" {len(gpus)}; remove async, {fewer}or make more visible with CUDA_VISIBLE_DEVICES"
            )
    actors = actor_range(spec, room).within(room)
    everything = actors.most * generating + others
    if learners > 1 and everything > len(gpus):
        raise TooFewGpusError(
            f"learning.instances.max is {learners}, but instances that learn together can't take turns, and the job"
            f" needs {everything} of this machine's {len(gpus)} GPUs; set it to 1 and learning.processes"
            f" to {learning * learners}, or lower generation.instances.max"
        )
    shared = SharedGpus(len(gpus), per_instance) if everything > len(gpus) else None
    preparers = preparer_range(spec, actors, per_instance)
    if shared is None and preparing:
        # Beside stages that have theirs at once, preparation has the GPUs that are left.
        preparers = preparers.within(preparing + len(gpus) - everything)
    return GpuAssignment(actors, preparers, tuple(gpus), per_instance, shared)
