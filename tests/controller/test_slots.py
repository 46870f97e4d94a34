"""Which jobs use GPUs in turns, and how many slots they are given."""

from collections.abc import Mapping
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient

from rlhfless_functions.api import Stage
from rlhfless_operator.controller.pools import Pools
from rlhfless_operator.controller.slots import SlotPools, slots_wanted
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.platforms.pods.manifests import SlotsWanted
from tests.controller.operator_harness import a_resource
from tests.jobs import small_job

GPU: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
FOUR: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}


def settings(**pool: Any) -> ClusterSettings:
    return ClusterSettings(functions_image="f", pools={"default": PoolSettings(gpus=8, **pool)})


def job(**spec: Any) -> RLHFJob:
    return RLHFJob.model_validate(small_job(**spec))


def wanted(made: RLHFJob, own: ClusterSettings) -> Mapping[Stage, SlotsWanted]:
    with Pools(own).joined(made, a_resource()) as member:
        found = slots_wanted(member, own)
        assert member.sleeps == bool(found)
        return found


def test_only_a_pool_with_a_device_class_has_slots() -> None:
    made = job(pods=GPU)
    assert wanted(made, settings()) == {}
    assert set(wanted(made, settings(device_class="c"))) == {"generation", "preparation", "learning"}


def test_a_stage_without_a_gpu_takes_no_turns() -> None:
    made = job(generation={"pods": GPU}, learning={"pods": FOUR})
    assert wanted(made, settings(device_class="c")) == {
        "generation": SlotsWanted("default", 1, "nvidia.com/gpu"),
        "learning": SlotsWanted("default", 4, "nvidia.com/gpu"),
    }
    assert wanted(job(), settings(device_class="c")) == {}
    assert wanted(job(pods=GPU, pool="another"), settings(device_class="c")) == {}


@pytest.mark.parametrize(
    ("spec", "gpus", "largest"),
    [
        ({"pods": GPU, "generation": {"instances": {"max": 3}}}, 3, 1),
        ({"pods": GPU}, 4, 1),
        ({"pods": GPU, "generation": {"instances": {"max": 1}}, "preparation": {"instances": {"max": 2}}}, 2, 1),
        ({"generation": {"pods": GPU, "instances": {"max": 2}}, "learning": {"pods": FOUR}}, 4, 4),
    ],
)
async def test_a_job_has_the_slots_of_its_largest_stage(spec: dict[str, Any], gpus: int, largest: int) -> None:
    own = settings(device_class="c", gpus_per_group=4, namespaces={"team": 4})
    async with ApiClient() as api:
        slots, pools = SlotPools(KnativeClient(api, field_manager="tests"), own), Pools(own)
        with pools.joined(job(**spec), a_resource()) as member, pools.joined(job(**spec), a_resource()) as other:
            share, again = slots.share_of(member), slots.share_of(other)
            assert share is not None
            assert (member.most_at_once, max(member.gpus.values())) == (gpus, largest)
            assert again is not None and again.pool is share.pool, "jobs of a namespace share its slots"
        with pools.joined(job(), a_resource()) as member:
            assert slots.share_of(member) is None
