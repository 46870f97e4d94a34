"""A namespace on a real API server with an emulated Knative, for jobs to be driven in."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import MAX_SCALE, MIN_SCALE
from tests.clusters.control_plane import ApiServer
from tests.clusters.knative_definitions import CONFIG_MAPS, NAMESPACES, api_client, knative_server
from tests.clusters.knative_emulation import KnativeEmulation
from tests.platforms.knative_jobs import JobUnderTest, job_under_test


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with knative_server(tmp_path_factory.mktemp("control-plane")) as server:
        yield server


class EmulatedCluster:
    """A namespace on an API server, with Knative."""

    def __init__(self, client: KnativeClient, knative: KnativeEmulation, folder: Path, namespace: str) -> None:
        self.client = client
        self.knative = knative
        self.folder = folder
        self.namespace = namespace

    async def owner(self, name: str = "job") -> Any:
        """An object that a job's objects belong to."""
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": self.namespace}}
        return await self.client.resource(CONFIG_MAPS).create(manifest)

    @asynccontextmanager
    async def job(
        self, owner: Any = None, *, start_timeout: float = 120.0, **options: Any
    ) -> AsyncIterator[JobUnderTest]:
        settings = ClusterSettings(functions_image="any", ingress=self.knative.url, start_timeout=start_timeout)
        owner = owner or await self.owner()
        async with job_under_test(self.client, owner, settings, root=str(self.folder), **options) as made:
            yield made

    async def bounds(self) -> tuple[str, str]:
        """min-scale and max-scale of the job's Revision."""
        (revision,) = (await self.client.revisions.list(self.namespace)).items
        return revision.metadata.annotations[MIN_SCALE], revision.metadata.annotations[MAX_SCALE]


@asynccontextmanager
async def open_cluster(server: ApiServer, folder: Path, **options: Any) -> AsyncIterator[EmulatedCluster]:
    async with api_client(server) as api:
        client = KnativeClient(api, field_manager="tests")
        namespace = f"test-{uuid.uuid4().hex[:8]}"
        await client.resource(NAMESPACES).create(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        )
        async with KnativeEmulation(client, **options) as emulation:
            yield EmulatedCluster(client, emulation, folder, namespace)


@pytest.fixture
async def cluster(server: ApiServer, tmp_path: Path) -> AsyncIterator[EmulatedCluster]:
    async with open_cluster(server, tmp_path) as made:
        yield made
