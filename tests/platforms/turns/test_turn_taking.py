"""Pods that use GPUs in turns, against a real API server with its ResourceClaims, and an emulated Knative."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rlhfless_functions.api import STAGES, Done, Stage
from rlhfless_operator.platforms import knative
from rlhfless_operator.platforms.base import InstanceLostError
from rlhfless_operator.platforms.pods.pod_watch import PodWatch
from rlhfless_operator.platforms.turns import slot_pool
from rlhfless_operator.platforms.turns.slot_claims import CLAIMS
from rlhfless_operator.platforms.turns.turn_taking import TurnTaking
from tests.clusters.control_plane import ApiServer
from tests.platforms.emulated_cluster import server as server  # The fixture.
from tests.platforms.knative_jobs import JobUnderTest, until
from tests.platforms.slotted_cluster import SlottedCluster, slotted, told
from tests.platforms.slotted_cluster import cluster as cluster  # The fixture.
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("no claims are made")


async def all_stages(job: JobUnderTest, rounds: int = 3) -> None:
    for _ in range(rounds):
        for stage in STAGES:
            await job.platform.hold(stage, 1)
            events = await job.run("work=0.1", stage)
            assert isinstance(events[-1], Done)
            await job.platform.hold(stage, 0)


async def test_three_stages_take_turns_on_one_gpu_and_each_pod_starts_once(cluster: SlottedCluster) -> None:
    async with cluster.job(stages=STAGES, slots=cluster.slots()) as job:
        await all_stages(job)
        pods = [pod.name for pod in cluster.knative.pods]
        assert len(pods) == 3
        assert cluster.most_awake(pods) == 1
        for name, pod in (await job.pods()).items():
            spec = pod.model_dump(by_alias=True)["spec"]
            assert list(spec["resourceClaims"]) == [
                {"name": "rlhfless-default-0-0", "resourceClaimName": "rlhfless-default-0-0"}
            ]
            assert spec["containers"][0]["resources"]["claims"] == [{"name": "rlhfless-default-0-0"}]
            states = job.states(name)
            assert states[:3] == ["starting", "asleep", "busy"], "what it loads first is part of its first task"
            assert states.count("busy") == 3
            assert "draining" not in states
        # The last one stays awake until somebody needs the GPU.
        assert len(cluster.awake()) == 1
        assert list(await cluster.claims()) == ["rlhfless-default-0-0"]


async def test_actors_spread_over_the_slots_and_the_learner_needs_several(cluster: SlottedCluster) -> None:
    slots = cluster.slots(4, together=2, largest=1)
    async with cluster.job(stages=("generation", "learning"), slots=slots) as job:
        await job.platform.hold("generation", 4)
        await job.until(4, "asleep")
        homes = {pod.metadata.annotations["rlhfless.io/slots"] for pod in (await job.pods()).values()}
        assert homes == {f"rlhfless-default-{group}-{index}" for group in (0, 1) for index in (0, 1)}
        async with AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(job.running("work=600"))
            assert len(cluster.awake()) == 4


async def test_jobs_of_a_namespace_take_turns(cluster: SlottedCluster) -> None:
    slots = cluster.slots()
    one, other = await cluster.owner("one"), await cluster.owner("other")
    async with (
        cluster.job(one, stages=("generation",), slots=slots) as first,
        cluster.job(other, stages=("generation",), slots=slots) as second,
    ):
        for job in (first, second):
            await job.platform.hold("generation", 1)
            await job.until(1, "asleep")
        await asyncio.gather(*(job.run(f"work=0.{number}") for number in (1, 2) for job in (first, second)))
        pods = [pod.name for pod in cluster.knative.pods]
        assert len(pods) == 2
        assert cluster.most_awake(pods) == 1


async def test_a_stage_whose_task_waits_while_slots_are_free_gets_one_more_pod(cluster: SlottedCluster) -> None:
    """The convoy: generation is on the slot of the preparation's only pod, and the other is free."""
    async with cluster.job(stages=("generation", "preparation"), slots=cluster.slots(2)) as job:
        await job.platform.hold("preparation", 1)
        (preparer,) = await job.until(1, "asleep")
        await job.platform.hold("generation", 2)
        await job.until(3, "asleep")
        homes = {name: pod.metadata.annotations["rlhfless.io/slots"] for name, pod in (await job.pods()).items()}
        actors = [job.running("work=600"), job.running("work=600")]
        names = [(await actor.__aenter__())[0] for actor in actors]
        preparing = asyncio.ensure_future(job.run("work=0", "preparation"))
        await asyncio.sleep(0.3)
        assert set(await job.pods()) == set(homes), "no slot is free for one more"
        for name, actor in sorted(zip(names, actors, strict=True), key=lambda each: homes[each[0]] == homes[preparer]):
            await actor.__aexit__(None, None, None)
            if homes[name] != homes[preparer]:
                assert isinstance((await preparing)[-1], Done)
                (fresh,) = set(await job.pods()) - set(homes)
                assert fresh in cluster.awake()


async def test_a_stage_whose_task_waits_for_less_than_a_start_takes_gets_no_pod(
    cluster: SlottedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    could_start = TurnTaking.could_start
    monkeypatch.setattr(
        TurnTaking, "could_start", lambda job, stage: None if could_start(job, stage) is None else 600.0
    )
    async with cluster.job(stages=("generation", "preparation"), slots=cluster.slots(2)) as job:
        await job.platform.hold("preparation", 1)
        await job.platform.hold("generation", 2)
        pods = await job.until(3, "asleep")
        homes = {name: pod.metadata.annotations["rlhfless.io/slots"] for name, pod in (await job.pods()).items()}
        actors = [job.running("work=600"), job.running("work=600")]
        names = [(await actor.__aenter__())[0] for actor in actors]
        (preparer,) = pods - set(names)
        preparing = asyncio.ensure_future(job.run("work=0", "preparation"))
        # The slot that preparation does not have is free first.
        for _, actor in sorted(zip(names, actors, strict=True), key=lambda each: homes[each[0]] == homes[preparer]):
            assert not preparing.done()
            await asyncio.sleep(1.5)
            await actor.__aexit__(None, None, None)
        assert isinstance((await preparing)[-1], Done)
        assert set(await job.pods()) == pods


async def test_a_task_waits_until_the_one_before_it_has_ended(cluster: SlottedCluster) -> None:
    async with cluster.job(stages=("generation", "learning"), slots=cluster.slots()) as job:
        for stage in ("generation", "learning"):
            await job.platform.hold(stage, 1)
        await job.until(2, "asleep")
        async with job.running("work=600,publish=0.3") as (generating, _):
            learning = asyncio.ensure_future(job.run("work=0", "learning"))
            await asyncio.sleep(0.5)
            assert cluster.awake() == [generating]
        assert isinstance((await learning)[-1], Done)
        assert cluster.most_awake([pod.name for pod in cluster.knative.pods]) == 1


async def test_a_task_that_takes_spare_slots_comes_after_one_of_another_job_that_came_later(
    cluster: SlottedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knative, "takes_spare_slots", lambda request: request.key.stage == "learning")
    slots = cluster.slots()
    ended: list[Stage] = []
    one, other = await cluster.owner("one"), await cluster.owner("other")
    async with (
        cluster.job(one, stages=("generation", "learning"), slots=slots) as first,
        cluster.job(other, stages=("generation",), slots=slots) as second,
    ):
        for job, stages in ((first, ("generation", "learning")), (second, ("generation",))):
            for stage in stages:
                await job.platform.hold(stage, 1)
            await job.until(len(stages), "asleep")

        async def work(job: JobUnderTest, stage: Stage) -> None:
            assert isinstance((await job.run("work=0", stage))[-1], Done)
            ended.append(stage)

        async with first.running("work=600"):
            tasks = []
            for number, (job, stage) in enumerate(((first, "learning"), (second, "generation")), start=1):
                tasks.append(asyncio.ensure_future(work(job, stage)))
                await until(lambda number=number: len(slots.pool._waiting) == number)
        await asyncio.gather(*tasks)
        assert ended == ["generation", "learning"]
        assert cluster.most_awake([pod.name for pod in cluster.knative.pods]) == 1


async def test_a_pod_whose_process_dies_frees_its_turn(cluster: SlottedCluster) -> None:
    async with cluster.job(stages=("generation", "learning"), slots=cluster.slots()) as job:
        for stage in ("generation", "learning"):
            await job.platform.hold(stage, 1)
        await job.until(2, "asleep")
        async with job.running("work=600") as (generating, _):
            await cluster.knative.crash(generating)
            with pytest.raises(InstanceLostError):
                await job.run("exit")
        assert isinstance((await job.run("work=0", "learning"))[-1], Done)


async def test_a_pod_that_terminates_slowly_holds_up_no_other(server: ApiServer, tmp_path: Path) -> None:
    async with slotted(server, tmp_path, terminating_seconds=0.3, lingering_seconds=10.0) as cluster:
        slots = cluster.slots()
        owner = await cluster.owner("next")
        async with PodWatch(cluster.client, [cluster.namespace]) as watch:
            async with cluster.job(stages=("generation",), slots=slots, watch=watch) as job:
                await job.platform.hold("generation", 1)
                await job.run("work=0")
                (awake,) = cluster.awake()
            terminating = cluster.knative.pod(awake)
            async with cluster.job(owner, stages=("generation",), slots=slots, watch=watch) as job:
                await job.platform.hold("generation", 1)
                assert await job.instance_of("work=0") != awake
                assert terminating in cluster.knative.pods, "it is still there, and its process has ended"


async def test_pods_that_an_earlier_driver_left_awake_sleep_before_anybody_wakes(cluster: SlottedCluster) -> None:
    owner = await cluster.owner()
    async with cluster.job(owner, stages=("generation", "learning"), slots=cluster.slots()) as before:
        for stage in ("generation", "learning"):
            await before.platform.hold(stage, 1)
        await before.run("work=0")
        (awake,) = cluster.awake()
        # Another operator takes over, and this one does not notice.
        async with cluster.job(owner, stages=("generation", "learning"), slots=cluster.slots()) as after:
            await after.until(2, "asleep")
            assert cluster.awake() == []
            await after.platform.hold("learning", 1)
            await after.run("work=0", "learning")
            assert await after.instance_of("work=0") == awake, "it slept, and was not replaced"
            assert cluster.most_awake([pod.name for pod in cluster.knative.pods]) == 1


async def test_a_pod_that_cannot_sleep_is_replaced(cluster: SlottedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless_operator.platforms.turns.turn_taking._SLEEP_SECONDS", 0.3)
    async with cluster.job(stages=("generation", "learning"), slots=cluster.slots()) as job:
        for stage in ("generation", "learning"):
            await job.platform.hold(stage, 1)
        stuck = await job.instance_of("work=0")
        running = cluster.knative.pod(stuck).running
        assert running is not None and running.function is not None
        running.function.sleep_seconds = 600
        assert isinstance((await job.run("work=0", "learning"))[-1], Done)
        await until(lambda: stuck in job.now("ended"), lambda: job.changes)


async def test_a_claim_that_is_deleted_under_its_pods_is_made_again(
    cluster: SlottedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_pool, "_REVIEW_SECONDS", 0.1)
    async with cluster.job(stages=("generation",), slots=cluster.slots()) as job:
        await job.platform.hold("generation", 1)
        await job.run("work=0")
        (claim,) = (await cluster.claims()).values()
        # No driver is there to hold it back until its last pod is gone, as a real one does.
        await cluster.client.resource(CLAIMS).delete(cluster.namespace, claim.metadata.name)
        made_anew = []

        async def look() -> None:
            while not made_anew:
                made_anew.extend(
                    each for each in (await cluster.claims()).values() if each.metadata.uid != claim.metadata.uid
                )
                await asyncio.sleep(0.05)

        await asyncio.wait_for(look(), 30)
        assert isinstance((await job.run("work=0"))[-1], Done)


async def test_pods_leave_a_claim_that_is_being_deleted(
    cluster: SlottedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim in use stays until its last pod is gone, and takes no new ones."""
    monkeypatch.setattr(slot_pool, "_REVIEW_SECONDS", 0.1)
    async with cluster.job(stages=("generation", "learning"), slots=cluster.slots()) as job:
        for stage in ("generation", "learning"):
            await job.platform.hold(stage, 1)
        await job.until(2, "asleep")
        first = set(await job.pods())
        (claim,) = await cluster.claims()
        claims = cluster.client.resource(CLAIMS)
        finalizers = {"metadata": {"finalizers": ["rlhfless.test/in-use"]}}
        await claims.patch(cluster.namespace, claim, finalizers)
        async with job.running("work=600") as (busy, _):
            await claims.delete(cluster.namespace, claim)
            await until(lambda: any("slots: ResourceClaims are being deleted" in each for each in job.problems))
            await until(lambda: len(job.now("ended")) == 1)
            assert job.now("ended") == first - {busy}, "a task is never interrupted"
        await until(lambda: job.now("ended") == first)
        await claims.patch(cluster.namespace, claim, {"metadata": {"finalizers": None}})
        await until(lambda: job.problems[-1] == "slots: ", lambda: job.problems)
        await job.until(2, "asleep")
        assert isinstance((await job.run("work=0", "learning"))[-1], Done)


async def test_slots_that_no_job_needs_are_given_back(cluster: SlottedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_pool, "_KEPT_SECONDS", 0.2)
    slots = cluster.slots(2)
    async with cluster.job(slots=slots) as job:
        await job.platform.hold("generation", 1)
        await job.run("work=0")
        assert len(await cluster.claims()) == 2
        await asyncio.sleep(0.5)
        assert len(await cluster.claims()) == 2

    async def gone() -> None:
        while await cluster.claims():
            await asyncio.sleep(0.05)

    await asyncio.wait_for(gone(), 30)


async def test_a_pod_that_sleeps_ends_where_another_one_lacks_memory_on_its_node(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs on one slot, whose node's memory holds two of their three pods."""
    monkeypatch.setattr(slot_pool, "_REVIEW_SECONDS", 0.1)
    monkeypatch.setattr(slot_pool, "_SCHEDULING_SECONDS", 3.0)
    async with slotted(server, tmp_path, memory=2) as cluster:
        slots = cluster.slots()
        one, other = await cluster.owner("one"), await cluster.owner("other")
        async with (
            cluster.job(one, stages=("generation", "learning"), slots=slots) as first,
            cluster.job(other, stages=("generation",), slots=slots) as second,
        ):
            for stage in ("generation", "learning"):
                await first.platform.hold(stage, 1)
            await first.until(2, "asleep")
            generated, learnt = [await first.instance_of("work=0", stage) for stage in ("generation", "learning")]
            await second.platform.hold("generation", 1)
            await until(lambda: any("Insufficient memory" in each for each in second.problems))
            assert "lower spec.pods.resources.requests.memory" in told(second)
            await asyncio.sleep(0.5)
            assert not first.now("ended"), "no task waits for it"

            guest = await second.instance_of("work=0")
            # A ReplicaSet may have made another one in passing.
            assert generated in first.now("ended")
            assert learnt not in first.now("ended"), "a learner has to load its state again: it goes last"
            # What has ended starts anew when there is work for it, in the place of the other job's pod.
            await first.platform.hold("generation", 1)
            assert await first.instance_of("work=0") not in (generated, learnt)
            assert guest in second.now("ended")
            assert cluster.most_awake([pod.name for pod in cluster.knative.pods]) == 1


async def test_a_pod_that_the_webhook_did_not_see_never_works(cluster: SlottedCluster) -> None:
    cluster.knative.admit = None
    async with cluster.job(slots=cluster.slots()) as job:
        await job.platform.hold("generation", 1)
        await until(lambda: any("generation: " in each and "has no slots" in each for each in job.problems))
        await until(lambda: bool(job.now("ended")))
