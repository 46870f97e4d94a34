"""The Knative platform against a real API server, with Knative emulated: what a cluster need not be there to show."""

import asyncio
import re
from pathlib import Path

import pytest

from rlhfless_functions.api import Done, Preload, WeightsReference
from rlhfless_functions.serving.preload import read_pointer
from rlhfless_functions.settings import ModelSettings
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.base import InstanceLostError, TaskFailedError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods import dispatch
from rlhfless_operator.platforms.pods.manifests import DELETION_COST
from rlhfless_operator.platforms.pods.pod_watch import PODS, PodWatch
from tests.clusters.control_plane import ApiServer
from tests.clusters.knative_definitions import api_client
from tests.clusters.server_door import ServerDoor
from tests.platforms.emulated_cluster import EmulatedCluster, open_cluster
from tests.platforms.emulated_cluster import cluster as cluster
from tests.platforms.emulated_cluster import server as server  # The fixtures.
from tests.platforms.knative_jobs import job_under_test, until
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("the platform meets no API server")


# --- holding ---


async def test_pods_come_and_go_with_what_is_held(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        await job.platform.hold("generation", 3)
        first = await job.until(3, "idle")
        assert await cluster.bounds() == ("3", "3")
        await job.platform.hold("generation", 1)
        await job.until(2, "ended")
        await job.platform.hold("generation", 0)
        await job.until(3, "ended")
        assert await cluster.bounds() == ("0", "1")
        for instance in first:
            assert job.states(instance) == ["starting", "idle", "draining", "ended"]


async def test_an_autoscaler_that_has_no_data_is_woken(server: ApiServer, tmp_path: Path) -> None:
    async with open_cluster(server, tmp_path, asleep=True) as cluster, cluster.job() as job:
        await job.platform.hold("generation", 2)
        await job.until(2, "idle")
        assert any(asked.endswith("/readyz") for asked in cluster.knative.asked)


async def test_surplus_pods_are_kept_for_as_long_as_was_asked(cluster: EmulatedCluster) -> None:
    async with cluster.job(keep_alive=1.5) as job:
        await job.platform.hold("generation", 2)
        await job.until(2, "idle")
        await job.platform.hold("generation", 0)
        for instance in await job.until(2, "ended"):
            at = {change.state: change.at for change in job.changes if change.instance == instance}
            assert at["draining"] >= at["idle"] + 1.5


async def test_of_the_surplus_the_pods_that_are_kept_outlive_the_others(cluster: EmulatedCluster) -> None:
    async with cluster.job(keep_alive=1.5) as job:
        await job.platform.hold("generation", 2)
        first = await job.until(2, "idle")
        async with job.running("work=600") as (worked, _):
            await asyncio.sleep(1.0)
            await job.platform.hold("generation", 0)
        (other,) = first - {worked}
        await until(lambda: job.states(other)[-1] in ("draining", "ended"))
        assert job.states(worked)[-1] == "idle"


async def test_a_busy_pod_is_never_the_one_that_goes(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
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


async def test_a_request_has_a_pod_though_none_is_held(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        events = await job.run("work=0.1")
        assert isinstance(events[-1], Done)
        await job.until(1, "ended")
        assert job.states(events[0].instance) == ["starting", "busy", "idle", "draining", "ended"] or job.states(
            events[0].instance
        ) == ["starting", "idle", "busy", "idle", "draining", "ended"]


async def test_what_fresh_pods_load_is_written_before_they_start(cluster: EmulatedCluster) -> None:
    preload = Preload(
        model=ModelSettings(source="m"), weights=WeightsReference(version=3, uri="w"), weights_line="lines/3"
    )
    uri = str(cluster.folder / "preload" / "generation.json")
    async with cluster.job() as job:
        await job.platform.hold("generation", 1, preload)
        await job.until(1, "idle")
        pointer = read_pointer(uri)
        assert pointer is not None
        assert (pointer.model, pointer.weights) == (preload.model, preload.weights)
        assert pointer.weights_line == "lines/3"
        await job.platform.hold("generation", 1)
        await until(lambda: read_pointer(uri) is None)


# --- requests ---


async def test_every_request_has_a_pod_to_itself(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        await job.platform.hold("generation", 4)
        instances = await asyncio.gather(*(job.instance_of("work=0.5") for _ in range(4)))
        assert len(set(instances)) == 4


async def test_a_cut_is_over_when_what_there_was_is_published(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        await job.platform.hold("generation", 1)
        async with job.running("work=600,publish=5") as (instance, _):
            function = cluster.knative.pod(instance).running.function
            assert function.busy
        assert not function.busy
        assert job.now("idle") == {instance}


async def test_a_pod_that_publishes_still_is_passed_over(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        await job.platform.hold("generation", 1)
        # As if pods could not be asked: a network policy allows Knative alone.
        job.platform._indirect_until = float("inf")
        async with job.running("work=600,publish=0.5") as (instance, _):
            pass
        assert await job.instance_of("work=0") == instance


async def test_a_killed_pods_work_is_lost_and_another_takes_its_place(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        await job.platform.hold("generation", 1)
        async with job.running("work=600") as (instance, events):
            await cluster.knative.crash(instance)
            with pytest.raises(InstanceLostError, match=f"{instance} was deleted"):
                async for _ in events:
                    pass
        assert await job.instance_of("work=0") != instance
        await until(lambda: job.states(instance)[-1] == "ended")


async def test_a_process_that_dies_is_named(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        with pytest.raises(
            InstanceLostError, match="CrashLoopBackOff: container function: back-off; Error, exit code 1"
        ):
            await job.run("exit")


async def test_a_pod_that_hangs_is_replaced(cluster: EmulatedCluster) -> None:
    async with cluster.job(stall_seconds=0.5) as job:
        await job.platform.hold("generation", 1)
        async with job.running("work=600,mute,stubborn") as (instance, events):
            with pytest.raises(InstanceLostError, match=r"the instance was silent for 0\.5 s"):
                async for _ in events:
                    pass
        assert await job.instance_of("work=0") != instance


async def test_a_drained_pods_answer_is_complete(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        await job.platform.hold("generation", 1)
        async with job.running("work=600") as (instance, events):
            await job.client.resource(PODS).delete(cluster.namespace, instance)
            said = [event async for event in events]
        assert isinstance(said[-1], Done)
        # What it did until its end was work.
        await until(lambda: "draining" in job.states(instance))
        assert job.states(instance)[: job.states(instance).index("draining")][-1] == "busy"
        assert said[-1].result == {"instance": instance, "finished": False}


async def test_words_of_proxies_are_not_the_functions(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        cluster.knative.refuse = [
            (503, "upstream connect error"),
            (504, "activator request timeout"),
            (404, "no route"),
        ]
        assert isinstance((await job.run("work=0"))[-1], Done)
        with pytest.raises(InstanceLostError, match="activator request timeout"):
            await job.run("truncate")


async def test_an_activator_that_stays_away_is_a_loss(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_TROUBLE_SECONDS", 0.5)
    async with cluster.job() as job:
        cluster.knative.down = True
        with pytest.raises(InstanceLostError, match="no healthy upstream"):
            await job.run("work=0")


async def test_what_a_function_says_is_handed_on(cluster: EmulatedCluster) -> None:
    async with cluster.job() as job:
        with pytest.raises(TaskFailedError, match="asked to fail"):
            await job.run("fail")
        assert isinstance((await job.run("work=0"))[-1], Done)


async def test_a_request_that_queues_while_a_pod_idles_is_sent_anew(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_REROUTE_SECONDS", 0.5)
    async with cluster.job() as job:
        await job.platform.hold("generation", 1)
        (instance,) = await job.until(1, "idle")
        # As if the activator that has the request had no pod to give.
        cluster.knative.pod(instance).requests = 1
        waiting = asyncio.create_task(job.instance_of("work=0"))
        asked = len(cluster.knative.asked)
        await until(lambda: len(cluster.knative.asked) >= asked + 2)
        cluster.knative.pod(instance).requests = 0
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


async def test_no_first_line_names_what_is_wrong(cluster: EmulatedCluster) -> None:
    cluster.knative.pod_status = UNSCHEDULABLE
    async with cluster.job(start_timeout=2.0) as job:
        expected = r"no generation pod took the work within 2 s: .*Unschedulable: 0/1 nodes: no GPU"
        with pytest.raises(InstanceLostError, match=expected):
            await job.run("work=0")
        assert any("no GPU" in problem for problem in job.problems)


async def test_pods_that_will_never_start_are_not_waited_for(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_HOPELESS_SECONDS", 0.5)
    cluster.knative.pod_status = NO_IMAGE
    async with cluster.job(start_timeout=3600.0) as job:
        with pytest.raises(
            InstanceLostError, match=r"the generation pods don't start: .*ImagePullBackOff: .*no such image"
        ):
            await job.run("work=0")


async def test_why_pods_are_missing_is_named(cluster: EmulatedCluster) -> None:
    message = 'pods "x" is forbidden: exceeded quota: gpus'
    cluster.knative.revision_conditions = [
        {"type": "ResourcesAvailable", "status": "False", "reason": "FailedCreate", "message": message}
    ]
    async with cluster.job() as job:
        # As if the ReplicaSet could make none.
        for revision in cluster.knative.revisions.values():
            revision.awake = False
        cluster.knative.down = True
        await job.platform.hold("generation", 1)
        await until(lambda: any("exceeded quota" in problem for problem in job.problems))


# --- restarts of the API server ---


async def test_pods_that_went_while_the_api_server_was_away_are_accounted_for(
    server: ApiServer, tmp_path: Path
) -> None:
    door = ServerDoor(server)
    await door.open()
    async with open_cluster(server, tmp_path) as cluster, api_client(server) as api:
        api.configuration.host = f"https://127.0.0.1:{door.port}"
        client = KnativeClient(api, field_manager="tests")
        owner = await cluster.owner()
        settings = ClusterSettings(functions_image="any", ingress=cluster.knative.url)
        async with job_under_test(client, owner, settings, root=str(tmp_path)) as job:
            await job.platform.hold("generation", 2)
            first = await job.until(2, "idle")
            await door.shut()
            # Streams do not pass through the API server.
            assert isinstance((await job.run("work=0.1"))[-1], Done)
            await cluster.knative.crash(min(first))
            await job.platform.hold("generation", 3)
            await door.open()
            await job.until(3, "idle")
            assert job.now("ended") == {min(first)}
        await door.shut()


# --- several jobs ---


async def test_jobs_share_a_watch_and_hear_of_their_own_pods_only(cluster: EmulatedCluster) -> None:
    one, two = await cluster.owner("one"), await cluster.owner("two")
    async with (
        PodWatch(cluster.client) as watch,
        cluster.job(one, watch=watch) as first,
        cluster.job(two, watch=watch) as second,
    ):
        await asyncio.gather(first.platform.hold("generation", 1), second.platform.hold("generation", 2))
        await asyncio.gather(first.until(1, "idle"), second.until(2, "idle"))
        assert all(re.match("one-", change.instance) for change in first.changes)
        assert all(re.match("two-", change.instance) for change in second.changes)
