"""The speed of an engine's GPU, before it has generated anything."""

from rlhfless_operator.job.instance_gpus import needed_gpus
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.latency.devices import find_profile
from rlhfless_operator.planner.latency.gpu_names import gpu_of
from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.training.costs.model_shape import find_shape


def starting_latency(job: RLHFJob, product: str | None) -> LinearLatency | None:
    """Return the latency of the job's instances by measured tables, or by the data sheet if nothing was measured.

    Args:
        product: name of their GPUs, from a driver, a node or the pool's settings. A rehearsal names its own.

    Returns:
        None if the GPU or the model is not known here, or the model does not fit it.
    """
    rehearsal, gpus = job.spec.rehearsal, needed_gpus(job.spec)["generation"]
    source, scale = job.spec.model.source, 1.0
    if rehearsal is not None:
        gpu: str | None = rehearsal.gpu
        source, scale = rehearsal.model or source, rehearsal.time_scale
    else:
        gpu = gpu_of(product) if product else None
    if gpu is None:
        return None
    try:
        latency = find_profile(find_shape(source), gpu, gpus, startup_seconds=0.0).latency.lines[0]
    except ValueError:
        return None
    return latency.times(scale)
