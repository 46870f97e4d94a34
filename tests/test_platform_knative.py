"""The Knative platform against a real API server, with Knative emulated: what a cluster need not be there to show."""

import asyncio
import os
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from control_plane import ApiServer, control_plane
from knative_emulation import CONFIG_MAPS, NAMESPACES, KnativeEmulation, api_client, install
from knative_jobs import JobUnderTest, job_under_test, until
from rlhfless_functions.api import Done, WeightsReference
from rlhfless_functions.preload import read_pointer
from rlhfless_functions.settings import ModelSettings
from rlhfless_operator.cluster_settings import ClusterSettings
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms import knative
from rlhfless_operator.platforms.base import InstanceLostError, PlatformUnavailableError, Preload, TaskFailedError
from rlhfless_operator.platforms.job_objects import POLICIES, SECRETS
from rlhfless_operator.platforms.manifests import DELETION_COST, MAX_SCALE, MIN_SCALE
from rlhfless_operator.platforms.pod_watch import PODS, PodWatch
from server_door import ServerDoor

ASSETS = os.environ.get("KUBEBUILDER_ASSETS")

pytestmark = pytest.mark.skipif(
    ASSETS is None,
    reason="the platform meets no API server: KUBEBUILDER_ASSETS names no etcd, kube-apiserver and kubectl",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    assert ASSETS is not None
    with control_plane(Path(ASSETS), tmp_path_factory.mktemp("control-plane")) as server:
        asyncio.run(_install(server))
        yield server


async def _install(server: ApiServer) -> None:
    async with api_client(server) as api:
        await install(KnativeClient(api, field_manager="tests"))


class World:
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
async def a_world(server: ApiServer, folder: Path, **options: Any) -> AsyncIterator[World]:
    async with api_client(server) as api:
        client = KnativeClient(api, field_manager="tests")
        namespace = f"test-{uuid.uuid4().hex[:8]}"
        await client.resource(NAMESPACES).create(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        )
        async with KnativeEmulation(client, **options) as emulation:
            yield World(client, emulation, folder, namespace)


@pytest.fixture
async def world(server: ApiServer, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(server, tmp_path) as made:
        yield made


# --- holding ---


async def test_pods_come_and_go_with_what_is_held(world: World) -> None:
    async with world.job() as job:
        await job.platform.hold("generation", 3)
        first = await job.until(3, "idle")
        assert await world.bounds() == ("3", "3")
        await job.platform.hold("generation", 1)
        await job.until(2, "ended")
        await job.platform.hold("generation", 0)
        await job.until(3, "ended")
        assert await world.bounds() == ("0", "1")
        for instance in first:
            assert job.states(instance) == ["starting", "idle", "draining", "ended"]


async def test_an_autoscaler_that_has_no_data_is_woken(server: ApiServer, tmp_path: Path) -> None:
    async with a_world(server, tmp_path, asleep=True) as world, world.job() as job:
        await job.platform.hold("generation", 2)
        await job.until(2, "idle")
        assert any(asked.endswith("/readyz") for asked in world.knative.asked)


async def test_surplus_pods_are_kept_for_as_long_as_was_asked(world: World) -> None:
    async with world.job(keep_alive=1.5) as job:
        await job.platform.hold("generation", 2)
        await job.until(2, "idle")
        await job.platform.hold("generation", 0)
        for instance in await job.until(2, "ended"):
            at = {change.state: change.at for change in job.changes if change.instance == instance}
            assert at["draining"] >= at["idle"] + 1.5


async def test_of_the_surplus_the_pods_that_are_kept_outlive_the_others(world: World) -> None:
    async with world.job(keep_alive=1.5) as job:
        await job.platform.hold("generation", 2)
        first = await job.until(2, "idle")
        async with job.running("work=600") as (worked, _):
            await asyncio.sleep(1.0)
            await job.platform.hold("generation", 0)
        (rested,) = first - {worked}
        await until(lambda: job.states(rested)[-1] in ("draining", "ended"))
        assert job.states(worked)[-1] == "idle"


async def test_a_busy_pod_is_never_the_one_that_goes(world: World) -> None:
    async with world.job() as job:
        await job.platform.hold("generation", 4)
        await job.until(4, "idle")
        async with job.running("work=600") as (busy, _):
            await job.platform.hold("generation", 1)
            await job.until(3, "ended")
            assert job.now("busy") == {busy}
            assert (await job.pods())[busy].metadata.annotations[DELETION_COST] == "1000"
            # Not even where nothing is wanted any more.
            await job.platform.hold("generation", 0)
            await job.run("work=0.1")
            assert job.now("busy") == {busy}


async def test_a_request_has_a_pod_though_none_is_held(world: World) -> None:
    async with world.job() as job:
        events = await job.run("work=0.1")
        assert isinstance(events[-1], Done)
        await job.until(1, "ended")
        assert job.states(events[0].instance) == ["starting", "busy", "idle", "draining", "ended"] or job.states(
            events[0].instance
        ) == ["starting", "idle", "busy", "idle", "draining", "ended"]


async def test_what_fresh_pods_load_is_written_before_they_start(world: World) -> None:
    preload = Preload(ModelSettings(source="m"), WeightsReference(version=3, uri="w"))
    uri = str(world.folder / "preload" / "generation.json")
    async with world.job() as job:
        await job.platform.hold("generation", 1, preload)
        await job.until(1, "idle")
        pointer = read_pointer(uri)
        assert pointer is not None
        assert (pointer.model, pointer.weights) == (preload.model, preload.weights)
        await job.platform.hold("generation", 1)
        await until(lambda: read_pointer(uri) is None)


# --- requests ---


async def test_every_request_has_a_pod_to_itself(world: World) -> None:
    async with world.job() as job:
        await job.platform.hold("generation", 4)
        instances = await asyncio.gather(*(job.instance_of("work=0.5") for _ in range(4)))
        assert len(set(instances)) == 4


async def test_a_cut_is_over_when_what_there_was_is_published(world: World) -> None:
    async with world.job() as job:
        await job.platform.hold("generation", 1)
        async with job.running("work=600,publish=5") as (instance, _):
            function = world.knative.pod(instance).running.function
            assert function.busy
        assert not function.busy
        assert job.now("idle") == {instance}


async def test_a_pod_that_publishes_still_is_passed_over(world: World) -> None:
    async with world.job() as job:
        await job.platform.hold("generation", 1)
        # As if pods could not be asked: a network policy allows Knative alone.
        job.platform._indirect_until = float("inf")
        async with job.running("work=600,publish=0.5") as (instance, _):
            pass
        assert await job.instance_of("work=0") == instance


async def test_a_killed_pods_work_is_lost_and_another_takes_its_place(world: World) -> None:
    async with world.job() as job:
        await job.platform.hold("generation", 1)
        async with job.running("work=600") as (instance, events):
            await world.knative.crash(instance)
            with pytest.raises(InstanceLostError, match=f"{instance} was deleted"):
                async for _ in events:
                    pass
        assert await job.instance_of("work=0") != instance
        await until(lambda: job.states(instance)[-1] == "ended")


async def test_a_process_that_dies_is_named(world: World) -> None:
    async with world.job() as job:
        with pytest.raises(
            InstanceLostError, match="CrashLoopBackOff: container function: back-off; Error, exit code 1"
        ):
            await job.run("exit")


async def test_a_pod_that_hangs_is_replaced(world: World) -> None:
    async with world.job(stall_seconds=0.5) as job:
        await job.platform.hold("generation", 1)
        async with job.running("work=600,mute,stubborn") as (instance, events):
            with pytest.raises(InstanceLostError, match=r"nothing was heard for 0\.5 s"):
                async for _ in events:
                    pass
        assert await job.instance_of("work=0") != instance


async def test_a_drained_pods_answer_is_complete(world: World) -> None:
    async with world.job() as job:
        await job.platform.hold("generation", 1)
        async with job.running("work=600") as (instance, events):
            await job.client.resource(PODS).delete(world.namespace, instance)
            said = [event async for event in events]
        assert isinstance(said[-1], Done)
        # What it did until its end was work.
        await until(lambda: "draining" in job.states(instance))
        assert job.states(instance)[: job.states(instance).index("draining")][-1] == "busy"
        assert said[-1].result == {"instance": instance, "finished": False}


async def test_words_of_proxies_are_not_the_functions(world: World) -> None:
    async with world.job() as job:
        world.knative.refuse = [(503, "upstream connect error"), (504, "activator request timeout"), (404, "no route")]
        assert isinstance((await job.run("work=0"))[-1], Done)
        with pytest.raises(InstanceLostError, match="activator request timeout"):
            await job.run("truncate")


async def test_an_activator_that_stays_away_is_a_loss(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knative, "_TROUBLE_SECONDS", 0.5)
    async with world.job() as job:
        world.knative.down = True
        with pytest.raises(InstanceLostError, match="no healthy upstream"):
            await job.run("work=0")


async def test_what_a_function_says_is_handed_on(world: World) -> None:
    async with world.job() as job:
        with pytest.raises(TaskFailedError, match="asked to fail"):
            await job.run("fail")
        assert isinstance((await job.run("work=0"))[-1], Done)


async def test_a_request_that_queues_while_a_pod_idles_is_sent_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knative, "_REROUTE_SECONDS", 0.5)
    async with world.job() as job:
        await job.platform.hold("generation", 1)
        (instance,) = await job.until(1, "idle")
        # As if the activator that has the request had no pod to give.
        world.knative.pod(instance).requests = 1
        waiting = asyncio.create_task(job.instance_of("work=0"))
        asked = len(world.knative.asked)
        await until(lambda: len(world.knative.asked) >= asked + 2)
        world.knative.pod(instance).requests = 0
        assert await waiting == instance


# --- what keeps pods from working ---

UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no GPU"}
    ],
}
NO_IMAGE = {
    "phase": "Pending",
    "containerStatuses": [
        {
            "name": "function",
            "ready": False,
            "restartCount": 0,
            "image": "none",
            "imageID": "",
            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
        }
    ],
}


async def test_no_first_line_names_what_is_wrong(world: World) -> None:
    world.knative.pod_status = UNSCHEDULABLE
    async with world.job(start_timeout=2.0) as job:
        expected = r"no generation pod took the work within 2 s: .*Unschedulable: 0/1 nodes: no GPU"
        with pytest.raises(InstanceLostError, match=expected):
            await job.run("work=0")
        assert any("no GPU" in problem for problem in job.problems)


async def test_pods_that_will_never_start_are_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knative, "_HOPELESS_SECONDS", 0.5)
    world.knative.pod_status = NO_IMAGE
    async with world.job(start_timeout=3600.0) as job:
        with pytest.raises(
            InstanceLostError, match=r"the generation pods don't start: .*ImagePullBackOff: .*no such image"
        ):
            await job.run("work=0")


async def test_why_pods_are_missing_is_named(world: World) -> None:
    message = 'pods "x" is forbidden: exceeded quota: gpus'
    world.knative.revision_conditions = [
        {"type": "ResourcesAvailable", "status": "False", "reason": "FailedCreate", "message": message}
    ]
    async with world.job() as job:
        # As if the ReplicaSet could make none.
        for revision in world.knative.revisions.values():
            revision.awake = False
        world.knative.down = True
        await job.platform.hold("generation", 1)
        await until(lambda: any("exceeded quota" in problem for problem in job.problems))


# --- opening and closing ---


async def test_everything_is_made_and_belongs_to_the_job(world: World) -> None:
    owner = await world.owner()
    async with world.job(owner, stages=("generation", "preparation", "learning")) as job:
        services = (await job.client.services.list(world.namespace)).items
        assert sorted(service.metadata.name for service in services) == [
            "job-generation", "job-learning", "job-preparation",
        ]  # fmt: skip
        secret = await job.client.resource(SECRETS).get(world.namespace, "job-token")
        policy = await job.client.resource(POLICIES).get(world.namespace, "job-functions")
        for made in (*services, secret, policy):
            (reference,) = made.metadata.owner_references
            assert (reference.uid, reference.controller) == (owner.metadata.uid, True)
        await job.run("work=0", "learning")


async def test_a_job_that_is_opened_again_keeps_its_token_and_its_pods(world: World) -> None:
    owner = await world.owner()
    async with world.job(owner) as job:
        await job.platform.hold("generation", 1)
        await job.until(1, "idle")
        token = (await job.client.resource(SECRETS).get(world.namespace, "job-token")).data
        # Another driver takes over while this one still has its pods.
        async with world.job(owner, keep_alive=600.0, watch=job.watch) as again:
            assert again.now("idle") == {change.instance for change in job.changes}
            assert job.now("ended") == again.now("idle")
            assert (await job.client.resource(SECRETS).get(world.namespace, "job-token")).data == token
            (revision,) = (await job.client.revisions.list(world.namespace)).items
            assert revision.metadata.name == "job-generation-00001"
            assert isinstance((await again.run("work=0"))[-1], Done)


async def test_a_closed_platform_leaves_no_pods_and_a_removed_one_no_services(world: World) -> None:
    async with world.job() as job:
        await job.platform.hold("generation", 2)
        await job.until(2, "idle")
        await job.platform.close()
        await job.until(2, "ended")
        assert len((await job.client.services.list(world.namespace)).items) == 1
        await job.platform.remove()
        assert (await job.client.services.list(world.namespace)).items == []
        assert (await job.client.resource(POLICIES).list(world.namespace)).items == []


async def test_what_somebody_else_made_is_left_alone(world: World) -> None:
    await world.client.services.create(
        {
            "apiVersion": "serving.knative.dev/v1",
            "kind": "Service",
            "metadata": {"name": "job-generation", "namespace": world.namespace},
            "spec": {"template": {"metadata": {"labels": {}, "annotations": {}}, "spec": {}}},
        }
    )
    with pytest.raises(
        PlatformUnavailableError, match=r"job-generation in namespace .* was not made by rlhfless; rename"
    ):
        async with world.job():
            pass


async def test_what_an_earlier_job_of_the_name_left_is_waited_for(world: World) -> None:
    earlier = await world.owner("job")
    async with world.job(earlier):
        pass
    await world.client.resource(CONFIG_MAPS).delete(world.namespace, "job")
    later = await world.owner("job")
    opening = asyncio.create_task(_instance_of(world, later))
    for resource, name in ((SECRETS, "job-token"), (POLICIES, "job-functions")):
        await world.client.resource(resource).delete(world.namespace, name)
    assert not opening.done()
    await world.client.services.delete(world.namespace, "job-generation")
    assert await opening


async def _instance_of(world: World, owner: Any) -> str:
    async with world.job(owner) as job:
        return await job.instance_of("work=0")


async def test_a_cluster_without_a_permission_or_without_knative_says_so(server: ApiServer, tmp_path: Path) -> None:
    async with api_client(server) as api, api_client(server) as weak:
        admin = KnativeClient(api, field_manager="tests")
        # Whoever is not known is anonymous, and may do nothing.
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


# --- restarts of the API server ---


async def test_pods_that_went_while_the_api_server_was_away_are_accounted_for(
    server: ApiServer, tmp_path: Path
) -> None:
    door = ServerDoor(server)
    await door.open()
    async with a_world(server, tmp_path) as world, api_client(server) as api:
        api.configuration.host = f"https://127.0.0.1:{door.port}"
        client = KnativeClient(api, field_manager="tests")
        owner = await world.owner()
        settings = ClusterSettings(functions_image="any", ingress=world.knative.url)
        async with job_under_test(client, owner, settings, root=str(tmp_path)) as job:
            await job.platform.hold("generation", 2)
            first = await job.until(2, "idle")
            await door.shut()
            # Streams do not pass through the API server.
            assert isinstance((await job.run("work=0.1"))[-1], Done)
            await world.knative.crash(min(first))
            await job.platform.hold("generation", 3)
            await door.open()
            await job.until(3, "idle")
            assert job.now("ended") == {min(first)}
        await door.shut()


# --- several jobs ---


async def test_jobs_share_a_watch_and_hear_of_their_own_pods_only(world: World) -> None:
    one, two = await world.owner("one"), await world.owner("two")
    async with (
        PodWatch(world.client) as watch,
        world.job(one, watch=watch) as first,
        world.job(two, watch=watch) as second,
    ):
        await asyncio.gather(first.platform.hold("generation", 1), second.platform.hold("generation", 2))
        await asyncio.gather(first.until(1, "idle"), second.until(2, "idle"))
        assert all(re.match("one-", change.instance) for change in first.changes)
        assert all(re.match("two-", change.instance) for change in second.changes)
