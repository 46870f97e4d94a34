"""Where pods are: nodes' labels from a real API server, and what a platform's tasks say of their instances."""

from collections.abc import AsyncIterator

import pytest

from rlhfless_functions.api import Started
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.planner.pools.placement import HOSTNAME
from rlhfless_operator.platforms.pods import node_places
from rlhfless_operator.platforms.pods.node_places import NODES, NodePlaces
from tests.platforms.emulated_cluster import EmulatedCluster
from tests.platforms.emulated_cluster import cluster as cluster
from tests.platforms.emulated_cluster import server as server  # The fixtures.
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("no node has a place")

KEYS = (HOSTNAME, "rack", "zone")


@pytest.fixture
async def client(cluster: EmulatedCluster) -> AsyncIterator[KnativeClient]:
    """With a node, the one on which emulated pods are."""
    labels = {HOSTNAME: "node", "zone": "a"}
    manifest = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node", "labels": labels}}
    await cluster.client.resource(NODES).apply(manifest)
    yield cluster.client


async def test_a_place_is_the_node_and_its_domains(client: KnativeClient) -> None:
    places = NodePlaces(client, KEYS, allowed=True)
    assert await places.of("node") == ["node", "", "a"]
    assert await places.of("") == []


async def test_nodes_are_looked_at_once_in_a_while(client: KnativeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    places = NodePlaces(client, KEYS, allowed=True)
    assert await places.of("later") == ["later"]
    manifest = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "later", "labels": {"rack": "r"}}}
    await client.resource(NODES).apply(manifest)
    assert await places.of("later") == ["later"]
    monkeypatch.setattr(node_places, "_PAUSE_SECONDS", 0.0)
    assert await places.of("later") == ["later", "r", ""]


async def test_without_the_right_a_place_is_the_node(client: KnativeClient) -> None:
    assert await NodePlaces(client, KEYS, allowed=False).of("node") == ["node"]


async def test_a_task_says_where_its_instance_is(cluster: EmulatedCluster, client: KnativeClient) -> None:
    async with cluster.job(places=NodePlaces(client, KEYS, allowed=True)) as job:
        started = next(event for event in await job.run("work=0") if isinstance(event, Started))
        assert started.place == ["node", "", "a"]
    async with cluster.job(await cluster.owner("other")) as job:
        started = next(event for event in await job.run("work=0") if isinstance(event, Started))
        assert started.place == []
