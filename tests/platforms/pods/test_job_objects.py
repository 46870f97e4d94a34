"""A job's objects: made and owned, kept by who opens the job again, and removed."""

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import Done
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.job_objects import POLICIES, SECRETS
from rlhfless_operator.platforms.pods.pod_watch import PodWatch
from tests.clusters.control_plane import ApiServer
from tests.clusters.knative_definitions import CONFIG_MAPS, api_client
from tests.platforms.emulated_cluster import EmulatedCluster
from tests.platforms.emulated_cluster import cluster as cluster
from tests.platforms.emulated_cluster import server as server  # The fixtures.
from tests.platforms.knative_jobs import job_under_test
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("no objects are made on an API server")


async def test_everything_is_made_and_belongs_to_the_job(cluster: EmulatedCluster) -> None:
    owner = await cluster.owner()
    async with cluster.job(owner, stages=("generation", "preparation", "learning")) as job:
        services = (await job.client.services.list(cluster.namespace)).items
        assert sorted(service.metadata.name for service in services) == [
            "job-generation", "job-learning", "job-preparation",
        ]  # fmt: skip
        secret = await job.client.resource(SECRETS).get(cluster.namespace, "job-token")
        policy = await job.client.resource(POLICIES).get(cluster.namespace, "job-functions")
        for made in (*services, secret, policy):
            (reference,) = made.metadata.owner_references
            assert (reference.uid, reference.controller) == (owner.metadata.uid, True)
        await job.run("work=0", "learning")


async def test_a_job_that_is_opened_again_keeps_its_token_and_its_pods(cluster: EmulatedCluster) -> None:
    owner = await cluster.owner()
    async with cluster.job(owner) as job:
        await job.platform.hold("generation", 1)
        await job.until(1, "idle")
        token = (await job.client.resource(SECRETS).get(cluster.namespace, "job-token")).data
        # Another driver takes over while this one still has its pods.
        async with cluster.job(owner, keep_alive=600.0, watch=job.watch) as again:
            assert again.now("idle") == {change.instance for change in job.changes}
            assert job.now("ended") == again.now("idle")
            assert (await job.client.resource(SECRETS).get(cluster.namespace, "job-token")).data == token
            (revision,) = (await job.client.revisions.list(cluster.namespace)).items
            assert revision.metadata.name == "job-generation-00001"
            assert isinstance((await again.run("work=0"))[-1], Done)


async def test_a_closed_platform_leaves_no_pods_and_a_removed_one_no_services(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        await job.platform.hold("generation", 2)
        await job.until(2, "idle")
        await job.platform.close()
        await job.until(2, "ended")
        assert len((await job.client.services.list(cluster.namespace)).items) == 1
        await job.platform.remove()
        assert (await job.client.services.list(cluster.namespace)).items == []
        assert (await job.client.resource(POLICIES).list(cluster.namespace)).items == []


async def test_what_somebody_else_made_is_left_alone(cluster: EmulatedCluster) -> None:
    await cluster.client.services.create(
        {
            "apiVersion": "serving.knative.dev/v1",
            "kind": "Service",
            "metadata": {"name": "job-generation", "namespace": cluster.namespace},
            "spec": {"template": {"metadata": {"labels": {}, "annotations": {}}, "spec": {}}},
        }
    )
    with pytest.raises(
        PlatformUnavailableError, match=r"job-generation in namespace .* was not created by rlhfless; rename"
    ):
        async with cluster.job():
            pass


async def test_a_job_that_ends_removes_nothing_of_somebody_else(cluster: EmulatedCluster) -> None:
    metadata = {"name": "job-environment", "namespace": cluster.namespace}
    template = {"metadata": {"labels": {}, "annotations": {}}, "spec": {}}
    service = {"apiVersion": "serving.knative.dev/v1", "kind": "Service", "spec": {"template": template}}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": {"podSelector": {}}}
    async with cluster.job() as job:
        await job.client.services.create({**service, "metadata": metadata})
        await job.client.resource(POLICIES).create({**policy, "metadata": metadata})
        await job.platform.close()
        await job.platform.remove()
        for left in (job.client.services, job.client.resource(POLICIES)):
            assert [each.metadata.name for each in (await left.list(cluster.namespace)).items] == ["job-environment"]


async def test_what_an_earlier_job_of_the_name_left_is_waited_for(cluster: EmulatedCluster) -> None:
    earlier = await cluster.owner("job")
    async with cluster.job(earlier):
        pass
    await cluster.client.resource(CONFIG_MAPS).delete(cluster.namespace, "job")
    later = await cluster.owner("job")
    opening = asyncio.create_task(_instance_of(cluster, later))
    for resource, name in ((SECRETS, "job-token"), (POLICIES, "job-functions")):
        await cluster.client.resource(resource).delete(cluster.namespace, name)
    assert not opening.done()
    await cluster.client.services.delete(cluster.namespace, "job-generation")
    assert await opening


async def _instance_of(cluster: EmulatedCluster, owner: Any) -> str:
    async with cluster.job(owner) as job:
        return await job.instance_of("work=0")


async def test_a_cluster_without_a_permission_or_without_knative_says_so(server: ApiServer, tmp_path: Path) -> None:
    async with api_client(server) as api, api_client(server) as weak:
        admin = KnativeClient(api, field_manager="tests")
        # An unknown user is anonymous, and may do nothing.
        weak.configuration.api_key.clear()
        with pytest.raises(PlatformUnavailableError, match=r"lacks a permission in namespace default: .*secrets"):
            await open_for(KnativeClient(weak, field_manager="tests"), admin, tmp_path)


async def open_for(client: KnativeClient, admin: KnativeClient, folder: Path) -> None:
    name = f"job-{uuid.uuid4().hex[:8]}"
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "default"}}
    owner = await admin.resource(CONFIG_MAPS).create(manifest)
    settings = ClusterSettings(functions_image="any")
    async with job_under_test(client, owner, settings, root=str(folder), watch=PodWatch(admin)):
        pass
