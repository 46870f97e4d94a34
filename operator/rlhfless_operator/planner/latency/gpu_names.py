"""Names of products, as drivers and nodes report them, and the GPUs with a data sheet that they are."""

import re

from rlhfless_operator.planner.latency.roofline import GPUS

_OTHER_VARIANTS = {"H100": {"PCIE", "NVL"}, "H200": {"NVL"}}
"""Words in the names of products that compute or read at another speed than the data sheet says."""
_PARTS = {"MIG", "SHARED"}
"""Words with which nodes name a part of a divided GPU."""


def gpu_of(product: str) -> str | None:
    """Return the name of the GPU, such as `H100`; None for one without a data sheet here.

    Args:
        product: from nvidia-smi (`NVIDIA H100 80GB HBM3`) or the node label `nvidia.com/gpu.product`
            (`NVIDIA-H100-80GB-HBM3`).
    """
    words = set(re.split(r"[^A-Z0-9]+", product.upper()))
    memory = {int(found[1]) for word in words if (found := re.fullmatch(r"(\d+)GB", word))}
    for name, gpu in GPUS.items():
        others = _OTHER_VARIANTS.get(name, set()) | _PARTS
        if name in words and not words & others and memory <= {round(gpu.memory / 1e9)}:
            return name
    return None
