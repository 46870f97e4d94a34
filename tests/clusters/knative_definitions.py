"""Knative's kinds on an API server of the tests' own, and the client of it."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubernetes.aio.client import ApiClient, Configuration

from rlhfless_operator.knative import Kind, KnativeClient, KubernetesObject, NotFoundError
from tests.clusters.control_plane import ApiServer, control_plane

GROUP = "serving.knative.dev"
NAMESPACES = Kind("", "v1", "namespaces", KubernetesObject)
CONFIG_MAPS = Kind("", "v1", "configmaps", KubernetesObject)
DEFINITIONS = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", KubernetesObject)


def custom_resource_definitions() -> list[dict[str, Any]]:
    """Knative's kinds, without their schemas."""
    return [_definition(kind) for kind in ("Service", "Revision", "Configuration")]


def _definition(kind: str) -> dict[str, Any]:
    plural = f"{kind.lower()}s"
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything, "status": anything}}},
    }
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def api_client(server: ApiServer) -> ApiClient:
    """The official client of a control plane of the tests' own."""
    configuration = Configuration()
    configuration.host = server.url
    configuration.verify_ssl = False
    configuration.api_key["BearerToken"] = f"Bearer {server.token}"
    configuration.connection_pool_maxsize = 100
    return ApiClient(configuration)


async def install(client: KnativeClient) -> None:
    """Give an API server Knative's kinds, and wait until it serves them."""
    definitions = client.resource(DEFINITIONS)
    for manifest in custom_resource_definitions():
        await definitions.apply(manifest)
    async with asyncio.timeout(60):
        for resource in (client.services, client.revisions, client.configurations):
            while True:
                with contextlib.suppress(NotFoundError):
                    await resource.list("default")
                    break
                await asyncio.sleep(0.05)


@contextlib.contextmanager
def knative_server(folder: Path) -> Iterator[ApiServer]:
    """A control plane with Knative's kinds."""

    async def install_there(server: ApiServer) -> None:
        async with api_client(server) as api:
            await install(KnativeClient(api, field_manager="tests"))

    with control_plane(folder) as server:
        asyncio.run(install_there(server))
        yield server
