"""Jobs of one operator in their pools."""

from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import Event, Preload, RunRequest, Stage
from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.conditions import Reason, Tell
from rlhfless_operator.controller.pools import Pools
from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.job.resource_status import ConditionType
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.pools.whole_gpus import SwitchCost
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.platforms.room import gpus_by_stage, room_in_pool
from tests.controller.operator_harness import a_resource

ONE_GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
SETTINGS = ClusterSettings(functions_image="f:1", pools={"h100": PoolSettings(gpus=2, namespaces={"small": 1})})


class Noting:
    """A cluster's platform that notes what it is asked for."""

    def __init__(self) -> None:
        self.held: dict[Stage, int] = {}
        self.calls: list[str] = []

    async def open(self) -> None:
        self.calls.append("open")

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        self.held[stage] = count

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        raise AssertionError("no task is sent here")
        yield

    async def close(self) -> None:
        self.calls.append("close")

    async def remove(self) -> None:
        self.calls.append("remove")


def tell(kind: ConditionType, true: bool, reason: Reason, message: str) -> None:
    """Ignore the call."""


class Cluster:
    """Jobs on a cluster with pools; knows their platforms by their uid."""

    def __init__(self, settings: ClusterSettings = SETTINGS) -> None:
        self.platforms: dict[str, Noting] = {}
        self.members: dict[str, PoolMember] = {}
        self._pools = Pools(settings)
        self._joined = ExitStack()

    def platform(self, job: RLHFJob, uid: str = "a", namespace: str = "team", tell: Tell = tell) -> JobPlatform:
        member = self._joined.enter_context(self._pools.joined(job, a_resource(uid, namespace)))
        self.members[uid], self.platforms[uid] = member, Noting()
        return JobPlatform(self.platforms[uid], member, *self._pools.hooks(member, job, tell))


@pytest.fixture
def job(tiny_job: Callable[..., Path]) -> Callable[..., RLHFJob]:
    def make(**overrides: Any) -> RLHFJob:
        spec = {"pods": ONE_GPU, "pool": "h100", "generation": {"instances": {"min": 1, "max": 2}}, **overrides}
        return load_job(tiny_job(**spec))

    return make


async def test_two_jobs_share_what_there_is(job: Callable[..., RLHFJob]) -> None:
    cluster = Cluster()
    a, b = (cluster.platform(job(), uid) for uid in "ab")
    await a.open()
    await b.open()
    await a.hold("generation", 2)
    assert cluster.platforms["a"].held == {"generation": 2}
    await b.hold("generation", 2)
    assert cluster.platforms["b"].held == {"generation": 1}
    await a.close()
    await a.remove()
    assert cluster.platforms["a"].calls == ["open", "close", "remove"]
    await b.hold("generation", 2)
    assert cluster.platforms["b"].held == {"generation": 2}
    await b.close()


async def test_jobs_whose_pods_take_turns_are_held_up_by_nothing_but_their_slots(job: Callable[..., RLHFJob]) -> None:
    pools = {"h100": PoolSettings(gpus=2, device_class="gpu.test")}
    cluster = Cluster(ClusterSettings(functions_image="f:1", pools=pools))
    a, b = (cluster.platform(job(), uid) for uid in "ab")
    for shared in (a, b):
        await shared.open()
        await shared.hold("generation", 2)
    assert [platform.held for platform in cluster.platforms.values()] == [{"generation": 2}, {"generation": 2}]
    for shared in (a, b):
        await shared.close()
    assert cluster.platforms["a"].calls == ["open", "close"]


async def test_a_job_that_waits_for_its_turn_says_for_whom(job: Callable[..., RLHFJob]) -> None:
    told: list[tuple[ConditionType, bool, Reason, str]] = []
    cluster = Cluster()
    a, b = cluster.platform(job(), "a"), cluster.platform(job(), "b", tell=lambda *said: told.append(said))
    for member in cluster.members.values():
        member.costs = lambda stage: SwitchCost(10.0, 5.0)
    for shared in (a, b):
        await shared.open()
        await shared.hold("generation", 2)
    ((kind, true, reason, message),) = told
    assert (kind, true, reason) == (conditions.PROGRESSING, False, Reason.WAITING_FOR_TURN)
    assert message.startswith("waits for its turn on 2 GPUs of pool h100: job a holds 2, for 9 min more")
    await a.close()
    assert told[1:] == [(conditions.PROGRESSING, True, Reason.TRAINING, "has its turn")]
    await b.close()


async def test_what_is_kept_is_the_pools_business(job: Callable[..., RLHFJob]) -> None:
    cluster = Cluster()
    shared = cluster.platform(job(learning={"keepAlive": "1h"}))
    await shared.open()
    await shared.hold("learning", 1)
    await shared.hold("learning", 0)
    assert cluster.platforms["a"].held == {"learning": 1}
    assert cluster.members["a"].platform_keep_alive == {}
    await shared.close()


async def test_without_pools_nothing_is_shared(job: Callable[..., RLHFJob]) -> None:
    cluster = Cluster(ClusterSettings(functions_image="f:1"))
    alone = cluster.platform(job(learning={"keepAlive": "1h"}))
    assert cluster.members["a"].platform_keep_alive["learning"] == 3600
    await alone.hold("generation", 9)
    assert cluster.platforms["a"].held == {"generation": 9}


async def test_a_pool_that_is_not_there_is_named(job: Callable[..., RLHFJob]) -> None:
    shared = Cluster().platform(job(pool="h200"))
    with pytest.raises(PlatformUnavailableError, match=r"spec.pool: the operator has no pool 'h200'; name one of h100"):
        await shared.open()
    await shared.close()


@pytest.mark.parametrize(
    ("device_class", "told"),
    [
        (None, r"max is 9, with 1 GPUs each, and the job may have \d of pool h100: set it to \d, or name another"),
        ("gpu.example", r"max is 9, and pods of pool h100 use GPUs in turns: .* Set it to 1 and give"),
    ],
)
async def test_learners_that_the_pool_has_no_room_for_are_refused(
    device_class: str | None, told: str, job: Callable[..., RLHFJob]
) -> None:
    pools = {"h100": SETTINGS.pools["h100"].model_copy(update={"device_class": device_class})}
    settings = SETTINGS.model_copy(update={"pools": pools})
    made = job(learning={"processes": 1, "instances": {"max": 9}})
    shared = Cluster(settings).platform(made)
    with pytest.raises(PlatformUnavailableError, match=rf"spec\.learning\.instances\.{told}"):
        await shared.open()
    await shared.close()


async def test_preparers_that_the_pool_has_no_room_for_are_refused(job: Callable[..., RLHFJob]) -> None:
    made = job(preparation={"instances": {"max": 9}})
    shared = Cluster().platform(made)
    told = r"max is 9, with 1 GPUs each, and the job may have \d of pool h100: set it to \d, or name another"
    with pytest.raises(PlatformUnavailableError, match=rf"spec\.preparation\.instances\.{told}"):
        await shared.open()
    await shared.close()


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        ({}, r"takes 3 GPUs at once, and the job may have 2 of pool h100: remove async"),
        ({"gpus": 8, "device_class": "gpu.example"}, r"pods of pool h100 use GPUs in turns: .* name a pool without a"),
    ],
)
async def test_a_pool_in_which_no_job_can_generate_while_it_learns_is_refused(
    pool: dict[str, Any], told: str, job: Callable[..., RLHFJob]
) -> None:
    settings = SETTINGS.model_copy(update={"pools": {"h100": SETTINGS.pools["h100"].model_copy(update=pool)}})
    shared = Cluster(settings).platform(job(**{"async": {}}))
    with pytest.raises(PlatformUnavailableError, match=rf"spec\.async generates while it learns.*{told}"):
        await shared.open()
    await shared.close()


async def test_an_asynchronous_job_has_gpus_for_all_of_its_stages_at_once(job: Callable[..., RLHFJob]) -> None:
    settings = SETTINGS.model_copy(update={"pools": {"h100": PoolSettings(gpus=5)}})
    ahead = job(**{"async": {}}, generation={"instances": {"min": 1}})
    assert room_in_pool(ahead, settings, "team") == 3
    assert room_in_pool(job(generation={"instances": {"min": 1}}), settings, "team") == 5
    two = job(**{"async": {}}, generation={"instances": {"min": 1}}, preparation={"instances": {"max": 2}})
    assert room_in_pool(two, settings, "team") == 2
    cluster = Cluster(settings)
    shared = cluster.platform(ahead)
    await shared.open()
    for stage, count in (("generation", 3), ("preparation", 1), ("learning", 1)):
        await shared.hold(stage, count)
    assert cluster.platforms["a"].held == {"generation": 3, "preparation": 1, "learning": 1}
    await shared.close()


async def test_a_job_that_its_namespace_has_no_quota_for_is_told(job: Callable[..., RLHFJob]) -> None:
    two = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
    shared = Cluster().platform(job(pods=two), namespace="small")
    with pytest.raises(
        PlatformUnavailableError, match=r"pool h100: .* asks for 2 GPUs, and namespace small may have 1"
    ):
        await shared.open()


def test_gpus_are_what_the_limits_of_a_stages_pods_say(job: Callable[..., RLHFJob]) -> None:
    defaults = PodsSpec(resources=ResourcesSpec(limits={"nvidia.com/gpu": "4", "cpu": "2"}))
    pool = SETTINGS.pools["h100"]
    made = job(pods={}, preparation={"pods": {"resources": {"limits": {"nvidia.com/gpu": "0"}}}})
    assert gpus_by_stage(made, defaults, pool) == {"generation": 4, "preparation": 0, "learning": 4}
    other = pool.model_copy(update={"resource": "amd.com/gpu"})
    assert gpus_by_stage(made, defaults, other) == {"generation": 0, "preparation": 0, "learning": 0}
