"""The GPU products of a cluster's nodes, from the labels of NVIDIA's GPU feature discovery."""

from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes.aio.client import ApiClient

from rlhfless_operator.knative import Transport

_LABEL = "nvidia.com/gpu.product"
_PATIENCE_SECONDS = 2.0


async def gpu_products_of(api: ApiClient) -> list[str]:
    """Return the GPU products of the schedulable nodes, each once.

    Raises:
        ApiError: nodes can't be listed.
    """
    transport = Transport(api, patience=_PATIENCE_SECONDS)
    return gpu_products((await transport.send("list", "GET", "/api/v1/nodes"))["items"])


def gpu_products(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the GPU products of the schedulable nodes, each once."""
    usable = [node for node in nodes if not node.get("spec", {}).get("unschedulable")]
    labels = [(node["metadata"].get("labels") or {}).get(_LABEL) for node in usable]
    return sorted({label for label in labels if label})
