"""The GPUs of the cluster's nodes, for commands that also work without a cluster."""

import asyncio
import os
from pathlib import Path

from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.incluster_config import SERVICE_TOKEN_FILENAME
from kubernetes.aio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

from rlhfless_operator.controller.main import connect
from rlhfless_operator.knative import ApiError
from rlhfless_operator.preflight.nodes import gpu_products_of


def products_of_nodes() -> list[str]:
    """Return the GPU products, each once; empty if there is no cluster, or if it does not tell."""
    places = [*(os.environ.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION).split(os.pathsep), SERVICE_TOKEN_FILENAME]
    if not any(Path(place).expanduser().is_file() for place in places):
        return []

    async def ask() -> list[str]:
        async with connect() as client:
            return await gpu_products_of(client)

    try:
        return asyncio.run(ask())
    except (ConfigException, ApiError):
        return []
