"""The Knative platform with real Knative, ingress, activator and queue-proxy: what its pods do at the edges.

The pods speak the wire contract and do nothing else: they run `tests/clusters/fake_function.py` in its image.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.images import Images
from rlhfless_functions.api import Done
from rlhfless_operator.controller.main import connect
from rlhfless_operator.job.pods import PodsSpec, merge_pods
from rlhfless_operator.knative import Kind, KnativeClient, KubernetesObject
from rlhfless_operator.platforms.base import InstanceLostError, PlatformUnavailableError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import DELETION_COST
from rlhfless_operator.platforms.pods.pod_watch import PODS
from tests.clusters import fake_function
from tests.platforms.knative_jobs import JobUnderTest, job_under_test, until

NAMESPACES = Kind("", "v1", "namespaces", KubernetesObject)
CONFIG_MAPS = Kind("", "v1", "configmaps", KubernetesObject)
PROGRAM = Path(fake_function.__file__)
FAKE_FUNCTION = PodsSpec.model_validate(
    {
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "volumes": [{"configMap": "job", "mountPath": "/fake", "readOnly": True}],
        "template": {"spec": {"containers": [{"name": "function", "command": ["python", f"/fake/{PROGRAM.name}"]}]}},
    }
)
"""What runs the program that the job's ConfigMap holds."""

MakeJob = Callable[..., AbstractAsyncContextManager[JobUnderTest]]


@pytest.fixture
def job(images: Images, tmp_path: Path) -> MakeJob:
    """Called, it makes a job in a namespace of its own, which goes with it."""
    return partial(_job, images.operator, tmp_path)


@asynccontextmanager
async def _job(
    image: str, folder: Path, pods: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[JobUnderTest]:
    name = f"rlhfless-test-{uuid.uuid4().hex[:8]}"
    start_timeout = options.pop("start_timeout", 120.0)
    settings = ClusterSettings(functions_image=image, start_timeout=start_timeout, **options.pop("settings", {}))
    async with connect() as api:
        client = KnativeClient(api, field_manager="rlhfless-tests")
        namespaces = client.resource(NAMESPACES)
        await namespaces.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        try:
            owner = await client.resource(CONFIG_MAPS).create(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "job", "namespace": name},
                    "data": {PROGRAM.name: PROGRAM.read_text()},
                }
            )
            spec = merge_pods(FAKE_FUNCTION, PodsSpec.model_validate(pods or {}))
            async with job_under_test(client, owner, settings, root=str(folder), pods=spec, **options) as made:
                yield made
        finally:
            await namespaces.delete(None, name)


async def test_pods_come_and_go_with_what_is_held(job: MakeJob) -> None:
    async with job() as under_test:
        hold = under_test.platform.hold
        await hold("generation", 3)
        await under_test.until(3, "idle")
        await hold("generation", 1)
        await under_test.until(1, "idle")
        await under_test.until(2, "draining")
        await hold("generation", 0)
        await under_test.until(3, "draining", "ended")
        await hold("generation", 2)
        fresh = await under_test.until(2, "idle")
        for instance in fresh:
            assert under_test.states(instance) == ["starting", "idle"]
        await under_test.until(3, "ended")


async def test_every_request_has_a_pod_to_itself_and_a_cut_is_over_when_it_is_published(job: MakeJob) -> None:
    async with job() as under_test:
        await under_test.platform.hold("generation", 2)
        async with (
            under_test.running("work=600,publish=2") as (first, _),
            under_test.running("work=600") as (second, _),
        ):
            assert first != second
            assert under_test.now("busy") == {first, second}
        # Both have published: neither refuses the next.
        done = await asyncio.gather(*(under_test.run("work=1") for _ in range(2)))
        assert all(isinstance(events[-1], Done) for events in done)
        assert under_test.now("idle") == {first, second}


async def test_a_pod_that_publishes_is_passed_over(job: MakeJob) -> None:
    async with job() as under_test:
        await under_test.platform.hold("generation", 1)
        await under_test.until(1, "idle")
        # As if pods could not be asked: a network policy allows Knative alone.
        under_test.platform._indirect_until = float("inf")
        async with under_test.running("work=600,publish=3") as (instance, _):
            pass
        assert await under_test.instance_of("work=0.1") == instance


async def test_a_busy_pod_is_never_the_one_that_goes(job: MakeJob) -> None:
    async with job() as under_test:
        await under_test.platform.hold("generation", 4)
        await under_test.until(4, "idle")
        async with under_test.running("work=600") as (busy, events):
            await under_test.platform.hold("generation", 1)
            await under_test.until(3, "draining", "ended")
            assert under_test.now("busy") == {busy}
            assert (await under_test.pods())[busy].metadata.annotations[DELETION_COST] == "1000"
            assert (await anext(events)).event == "heartbeat"


async def test_a_killed_pods_work_is_lost_and_another_takes_its_place(job: MakeJob) -> None:
    async with job() as under_test:
        await under_test.platform.hold("generation", 1)
        async with under_test.running("work=600,stubborn") as (instance, events):
            pods = under_test.client.resource(PODS)
            await pods.delete(under_test.owner.metadata.namespace, instance, grace_period_seconds=3)
            with pytest.raises(InstanceLostError, match=f"{instance} was deleted"):
                async for _ in events:
                    pass
        assert await under_test.instance_of("work=0") != instance
        await until(lambda: under_test.states(instance)[-1] == "ended")


async def test_a_pod_whose_process_dies_is_a_lost_instance(job: MakeJob) -> None:
    async with job() as under_test:
        with pytest.raises(InstanceLostError, match="exit code 1"):
            await under_test.run("exit")
        assert isinstance((await under_test.run("work=0"))[-1], Done)


async def test_a_pod_that_says_nothing_is_replaced(job: MakeJob) -> None:
    async with job(stall_seconds=3.0, start_timeout=60.0) as under_test:
        await under_test.platform.hold("generation", 1)
        await under_test.until(1, "idle")
        async with under_test.running("work=600,mute,stubborn") as (instance, events):
            with pytest.raises(InstanceLostError, match="the instance was silent for 3 s"):
                async for _ in events:
                    pass
        assert await under_test.instance_of("work=0") != instance


async def test_no_first_line_is_an_error_that_names_what_is_wrong_with_the_pods(job: MakeJob) -> None:
    pods = {"nodeSelector": {"rlhfless.io/no-such": "node"}}
    async with job(pods, start_timeout=15.0) as under_test:
        with pytest.raises(InstanceLostError, match=r"no generation pod took the work within 15 s.*Unschedulable"):
            await under_test.run("work=0")
        assert any("Unschedulable" in problem for problem in under_test.problems)


async def test_a_quota_that_is_used_up_is_named(job: MakeJob) -> None:
    pods = {"resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": 1, "memory": "64Mi"}}}
    async with job(pods, start_timeout=20.0) as under_test:
        quotas = under_test.client.resource(Kind("", "v1", "resourcequotas", KubernetesObject))
        namespace = under_test.owner.metadata.namespace
        await quotas.create(
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "none", "namespace": namespace},
                "spec": {"hard": {"pods": "0"}},
            }
        )
        with pytest.raises(InstanceLostError, match="exceeded quota"):
            await under_test.run("work=0")


async def test_surplus_pods_are_kept_for_as_long_as_was_asked(job: MakeJob) -> None:
    async with job(keep_alive=5.0) as under_test:
        await under_test.platform.hold("generation", 2)
        await under_test.until(2, "idle")
        await under_test.platform.hold("generation", 0)
        await under_test.until(2, "draining", "ended")
        for instance in under_test.now("draining", "ended"):
            idle = next(
                change.at for change in under_test.changes if change.instance == instance and change.state == "idle"
            )
            going = next(
                change.at for change in under_test.changes if change.instance == instance and change.state == "draining"
            )
            assert going >= idle + 5.0


async def test_a_closed_platform_leaves_no_pods_and_a_removed_one_no_services(job: MakeJob) -> None:
    async with job() as under_test:
        await under_test.platform.hold("generation", 2)
        await under_test.until(2, "idle")
        await under_test.platform.close()
        await until(lambda: under_test.now("idle") == set())
        await under_test.until(2, "ended")
        async with asyncio.timeout(60):
            while await under_test.pods():
                await asyncio.sleep(0.5)
        namespace = under_test.owner.metadata.namespace
        assert [each.metadata.name for each in (await under_test.client.services.list(namespace)).items] == [
            "job-generation"
        ]
        await under_test.platform.remove()
        assert (await under_test.client.services.list(namespace)).items == []


@pytest.mark.parametrize(
    ("pods", "settings", "remedy"),
    [
        (
            {"template": {"spec": {"hostNetwork": True}}},
            {},
            r"hostNetwork.*ConfigMap config-features.*rlhfless preflight",
        ),
        ({}, {"request_timeout": 1e6}, r"max-revision-timeout-seconds.*lower RLHFLESS_REQUEST_TIMEOUT"),
        (
            {"template": {"spec": {"containers": [{"name": "function", "lifecycle": {}}]}}},
            {},
            r"containers\[0\]\.lifecycle: .*remove it from the `template`",
        ),
    ],
)
async def test_what_knative_refuses_comes_with_a_remedy(
    job: MakeJob, pods: dict[str, Any], settings: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(PlatformUnavailableError, match=remedy):
        async with job(pods, settings=settings):
            pass
