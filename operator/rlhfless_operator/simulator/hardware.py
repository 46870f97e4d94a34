"""The hardware of `rlhfless plan`: the GPUs named by the user, else those of a pool, this machine or a cluster."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhfless_operator.job.actor_range import ActorRange, actor_range
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.latency.gpu_names import gpu_of
from rlhfless_operator.planner.latency.roofline import GPUS
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.local.gpus import gpu_products, visible_gpus
from rlhfless_operator.platforms.room import pool_of, room_in_pool

_KNOWN = ", ".join(sorted(GPUS))


@dataclass(frozen=True)
class Surroundings:
    """The places where a job may run, as far as this process can tell."""

    settings: ClusterSettings | None = None
    """The operator's settings, if this process has its variables."""
    gpus: Sequence[str] = ()
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    products: Sequence[str] = ()
    """Products of these GPUs, each once."""
    products_of_nodes: Callable[[], Sequence[str]] = tuple
    """Returns the products of a cluster's nodes; called if nothing else names a GPU."""


def look_around(environment: Mapping[str, str], products_of_nodes: Callable[[], Sequence[str]]) -> Surroundings:
    """Return the surroundings of this process.

    Args:
        environment: with the operator's variables; only RLHFLESS_POOLS must be set.

    Raises:
        ClusterSettingsError: one of these variables is wrong.
    """
    settings = None
    if environment.get("RLHFLESS_POOLS"):
        settings = ClusterSettings.from_environment({"RLHFLESS_FUNCTIONS_IMAGE": "rlhfless-functions", **environment})
    gpus = visible_gpus(environment)
    products = gpu_products(gpus, environment) if gpus else ()
    return Surroundings(settings, gpus, products, products_of_nodes)


@dataclass(frozen=True)
class Hardware:
    """The GPUs of instances, and the most actors."""

    gpu: str
    """Name of the GPU's data sheet."""
    gpus: int
    """Number of GPUs of a generation instance."""
    actors: ActorRange
    actors_by: str
    """Source of the most actors."""


def find_hardware(job: RLHFJob, gpu: str | None, around: Surroundings, gpus_on: Callable[[str], int]) -> Hardware:
    """Return the GPUs to forecast for: the named ones, else the pool's, this machine's, or the cluster's.

    Args:
        gpu: name of a data sheet; None if not given.
        gpus_on: returns the number of GPUs of a generation instance, by their name.

    Raises:
        ValueError: nothing names a GPU, or the GPU has no data sheet; the message has the remedy.
    """
    rehearsal, generation = job.spec.rehearsal, job.spec.generation
    gpu = gpu or (rehearsal.gpu if rehearsal else None)
    name = pool_of(job)
    pool = None if around.settings is None else around.settings.pools.get(name)
    here = False
    if gpu is None and pool is not None and pool.accelerator is not None:
        gpu = _named([pool.accelerator], f"pool {name}")
    elif gpu is None and around.products:
        gpu, here = _named(around.products, "this machine"), True
    elif gpu is None:
        gpu = _named(around.products_of_nodes(), "the cluster")
    if gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: choose one of {', '.join(GPUS)}")
    gpus = gpus_on(gpu)
    room, by = None, ""
    if pool is not None and around.settings is not None:
        namespace = job.metadata.namespace or "default"
        asked = room_in_pool(job, around.settings, namespace)
        whole = min(pool.gpus, pool.namespaces.get(namespace, pool.gpus))
        room, by = (whole // max(1, gpus) if asked is None else asked), f"pool {name}"
    if here and room is None:
        room, by = len(around.gpus) // max(1, gpus), "this machine's GPUs"
    if generation.instances.max is not None:
        by = "generation.instances.max"
    elif room is None:
        by = "nothing here tells how many GPUs there are: --set spec.generation.instances.max=N"
    return Hardware(gpu, gpus, actor_range(job.spec, room), by)


def _named(products: Sequence[str], whose: str) -> str:
    """Return the one GPU that all products are."""
    if not products:
        raise ValueError(
            f"gpu is missing: give --gpu, one of {_KNOWN}; no pool's accelerator (RLHFLESS_POOLS), no driver of this"
            " machine and no label nvidia.com/gpu.product of a cluster's nodes names one"
        )
    if len(products) > 1:
        raise ValueError(f"gpu is missing: {whose} has {' and '.join(products)}; give --gpu, one of {_KNOWN}")
    (product,) = products
    if (gpu := gpu_of(product)) is None:
        raise ValueError(
            f"gpu is missing: {whose} has {product}, of which there is no data sheet here; give --gpu the nearest of"
            f" {_KNOWN}"
        )
    return gpu
