"""The servers of an environment beside the stages of a job: on a real API server, with an emulated Knative."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from rlhfless_functions.api import Event, Failed, FailureReason, Started
from rlhfless_functions.settings import EnvironmentSettings, OpenEnvEnvironment
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.platforms.base import TaskFailedError
from rlhfless_operator.platforms.pods.environment_manifests import EnvironmentFunction
from rlhfless_operator.platforms.pods.job_objects import POLICIES
from rlhfless_operator.platforms.pods.manifests import MIN_SCALE, JobIdentity
from tests.platforms.emulated_cluster import EmulatedCluster
from tests.platforms.emulated_cluster import cluster as cluster
from tests.platforms.emulated_cluster import server as server  # The fixtures.
from tests.platforms.knative_jobs import DEADLINE_SECONDS, JobUnderTest, until
from tests.platforms.test_stream import generation_request
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("no servers of environments are made on an API server")
ENVIRONMENT = {"openenv": {"image": "maze:1"}}


@asynccontextmanager
async def open_job(cluster: EmulatedCluster) -> AsyncIterator[JobUnderTest]:
    owner = await cluster.owner()
    identity = JobIdentity(cluster.namespace, owner.metadata.name, owner.metadata.uid, "v1", "ConfigMap")
    environment = EnvironmentFunction(identity, OpenEnvEnvironment(image="maze:1"), PodsSpec())
    async with cluster.job(owner, environment=environment) as job:
        yield job


def acting(**environment: Any) -> Any:
    """A task whose samples act in an environment."""
    request = generation_request()
    settings = EnvironmentSettings.model_validate(environment or ENVIRONMENT)
    key = request.key.model_copy(update={"part": "work=600"})
    return request.model_copy(update={"key": key, "environment": settings})


async def least(cluster: EmulatedCluster) -> str:
    revision = await cluster.client.revisions.get(cluster.namespace, "job-environment-00001")
    return revision.metadata.annotations[MIN_SCALE]


async def bring_a_pod(cluster: EmulatedCluster, job: JobUnderTest) -> None:
    """Bring a pod as a session's request does. The platform bounds their least number meanwhile, so say it again."""
    kept = {"metadata": {"annotations": {MIN_SCALE: "1"}}}
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not any(change.stage == "environment" for change in job.changes):
            await job.client.revisions.patch(cluster.namespace, "job-environment-00001", kept)
            await asyncio.sleep(0.1)


async def test_a_job_has_a_service_and_a_policy_of_its_environment_and_removes_them(cluster: EmulatedCluster) -> None:
    async with open_job(cluster) as job:
        names = {service.metadata.name for service in (await job.client.services.list(cluster.namespace)).items}
        assert names == {"job-generation", "job-environment"}
        policies = (await job.client.resource(POLICIES).list(cluster.namespace)).items
        assert {policy.metadata.name for policy in policies} == {"job-functions", "job-environment"}
        await job.platform.close()
        await job.platform.remove()
        assert (await job.client.services.list(cluster.namespace)).items == []
        assert (await job.client.resource(POLICIES).list(cluster.namespace)).items == []


async def test_a_platform_that_closes_keeps_no_pods(cluster: EmulatedCluster) -> None:
    async with open_job(cluster) as job:
        with job.platform._environment.used():
            await bring_a_pod(cluster, job)
            await until(lambda: bool(job.now("busy")))
            await job.platform.close()
            assert await least(cluster) == "0"


async def test_a_failed_environment_tells_the_problem_of_its_pods(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no CPU"}
    reason: FailureReason = "environment_failed"

    async def failing(request: Any) -> AsyncIterator[Event]:
        yield Failed(reason=reason, message="the environment has no server", retryable=True, of="other")
        raise TaskFailedError(Failed(reason=reason, message="the environment has no server", retryable=True))

    async with open_job(cluster) as job:
        monkeypatch.setattr(job.platform, "_run", failing)
        cluster.knative.pod_status = {"phase": "Pending", "conditions": [unscheduled]}
        # The platform bounds the least number of pods as it begins: without a task it would let this one go.
        with job.platform._environment.used():
            await bring_a_pod(cluster, job)
            await until(lambda: bool(job.platform._environment._problem))
            told = r"the environment has no server; its pods: job-environment-\S+: Unschedulable: no CPU"
            with pytest.raises(TaskFailedError, match=told) as caught:
                async for event in job.platform.run(acting()):
                    assert isinstance(event, Failed) and re.fullmatch(told, event.message)
            assert caught.value.retryable
            reason = "data_invalid"
            with pytest.raises(TaskFailedError, match=r"no server$"):
                async for _ in job.platform.run(acting()):
                    pass


async def test_tasks_get_its_address_and_keep_its_pods(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[EnvironmentSettings] = []
    async with open_job(cluster) as job:
        send = job.platform._send

        def noting(request: Any, *others: Any) -> Any:
            sent.append(request.environment)
            return send(request, *others)

        monkeypatch.setattr(job.platform, "_send", noting)
        assert job.now("starting", "busy") == set()
        async with aclosing(job.platform.run(acting())) as events:
            assert isinstance(await anext(events), Started)
            # A session's request brings a pod; a task that needs it keeps it.
            await bring_a_pod(cluster, job)
            (pod,) = {change.instance for change in job.changes if change.stage == "environment"}
            await until(lambda: job.states(pod)[-1:] == ["busy"])
            assert await least(cluster) == "1"
        await until(lambda: job.states(pod)[-1:] == ["ended"], lambda: job.states(pod))
        assert await least(cluster) == "0"
        async with aclosing(job.platform.run(acting(openenv={"url": "http://maze:8000"}))) as events:
            await anext(events)
    ours, elsewhere = (each.openenv for each in sent)
    assert ours is not None and elsewhere is not None
    assert ours.url is not None and f"job-environment.{cluster.namespace}" in ours.url
    assert (ours.image, ours.start_limit) == (None, 300.0)
    assert elsewhere.url == "http://maze:8000"
