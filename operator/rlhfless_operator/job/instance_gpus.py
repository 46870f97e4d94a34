"""The pods of each stage, and the GPUs that an instance of it has."""

from rlhfless_functions.api import STAGES, Stage
from rlhfless_operator.job.pods import PodsSpec, merge_pods
from rlhfless_operator.job.quantities import quantity
from rlhfless_operator.job.sections import JobFields


def pods_by_stage(spec: JobFields) -> dict[Stage, PodsSpec]:
    """Merge the pods of every stage: the stage's settings over the job's over the cluster's defaults.

    Without a cluster there are no defaults (`RLHFJob.on_cluster`).
    """
    own: dict[Stage, PodsSpec] = {stage: getattr(spec, stage).pods for stage in STAGES}
    return {stage: merge_pods(spec.default_pods, spec.pods, pods) for stage, pods in own.items()}


def gpus_of(pods: PodsSpec, resource: str | None = None) -> int:
    """Count the GPUs in the limits of these pods.

    Args:
        resource: name of the only resource that counts, such as that of a pool; by default every `…/gpu`.
    """
    limits = (pods.resources.limits if pods.resources is not None else None) or {}
    counted = [name for name in limits if (name.endswith("/gpu") if resource is None else name == resource)]
    return sum(int(quantity(limits[name])) for name in counted)


def needed_gpus(spec: JobFields) -> dict[Stage, int]:
    """Count the GPUs that an instance of each stage computes with, by the settings: those of an engine or a learner."""
    if spec.rehearsal is not None:
        emulated = spec.rehearsal.gpus
        return {"generation": emulated, "preparation": emulated, "learning": spec.learning.processes or emulated}
    tensor_parallel = 1 if spec.generation.engine == "transformers" else spec.generation.vllm.tensor_parallel_size
    return {"generation": tensor_parallel, "preparation": 1, "learning": spec.learning.processes or 1}


def instance_gpus(spec: JobFields) -> dict[Stage, int]:
    """Count the GPUs that an instance of each stage holds: those of its pods, or else those that it needs."""
    asked = {stage: gpus_of(pods) for stage, pods in pods_by_stage(spec).items()}
    return asked if spec.rehearsal is None and any(asked.values()) else needed_gpus(spec)
