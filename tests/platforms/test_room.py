"""How many generation instances a pool and a namespace's quotas have room for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.platforms.room import room_in_pool, room_in_quotas, why_not_in_quotas

SETTINGS = ClusterSettings(
    functions_image="f:1",
    pods=PodsSpec(resources=ResourcesSpec(limits={"nvidia.com/gpu": "2", "cpu": "4"})),
    pools={
        "default": PoolSettings(gpus=9, namespaces={"small": 4}),
        "mi300": PoolSettings(gpus=8, resource="amd.com/gpu"),
    },
)


@pytest.fixture
def job(tiny_job: Callable[..., Path]) -> Callable[..., RLHFJob]:
    return lambda **spec: load_job(tiny_job(**spec))


def gpus(count: int) -> dict[str, Any]:
    return {"pods": {"resources": {"limits": {"nvidia.com/gpu": count}}}}


def quota(**hard: str) -> dict[str, Any]:
    return {"spec": {"hard": {f"requests.nvidia.com/{name}": amount for name, amount in hard.items()}}}


@pytest.mark.parametrize(
    ("spec", "namespace", "room"),
    [
        ({}, "team", 4),
        ({}, "small", 2),
        ({"generation": gpus(4)}, "team", 2),
        ({"generation": gpus(5)}, "small", 0),
        ({"generation": gpus(0)}, "team", None),
        ({"pool": "mi300"}, "team", None),
        ({"pool": "elsewhere"}, "team", None),
    ],
)
def test_generation_may_have_all_that_the_namespace_may_have_of_the_pool(
    job: Callable[..., RLHFJob], spec: dict[str, Any], namespace: str, room: int | None
) -> None:
    assert room_in_pool(job(**spec), SETTINGS, namespace) == room


@pytest.mark.parametrize(
    ("spec", "quotas", "room"),
    [
        ({}, [], None),
        ({}, [quota(gpu="10")], 3),
        ({"preparation": gpus(0)}, [quota(gpu="10")], 4),
        ({"preparation": {"instances": {"max": 2}}}, [quota(gpu="10")], 2),
        ({}, [quota(gpu="10"), quota(gpu="8")], 2),
        ({}, [quota(gpu="2")], 1),
        ({}, [quota(mig="10"), {"spec": {"hard": {"requests.cpu": "64", "pods": "3"}}}, {"spec": {}}], None),
        ({"generation": gpus(0)}, [quota(gpu="10")], None),
    ],
)
def test_a_quota_leaves_room_for_the_instances_of_the_other_stages(
    job: Callable[..., RLHFJob], spec: dict[str, Any], quotas: list[dict[str, Any]], room: int | None
) -> None:
    assert room_in_quotas(job(**spec), SETTINGS, quotas) == room


def test_a_quota_must_have_room_for_all_stages_of_an_asynchronous_job(job: Callable[..., RLHFJob]) -> None:
    ahead = job(**{"async": {}})
    assert why_not_in_quotas(ahead, SETTINGS, []) is None
    assert why_not_in_quotas(ahead, SETTINGS, [quota(gpu="6"), quota(mig="1")]) is None
    assert why_not_in_quotas(job(), SETTINGS, [quota(gpu="5")]) is None, "its stages wait for each other"
    small = {"metadata": {"name": "gpus"}, **quota(gpu="5")}
    assert why_not_in_quotas(ahead, SETTINGS, [quota(gpu="6"), small]) == (
        "spec.async generates while it learns, which takes 6 nvidia.com/gpu at once, and quota gpus of the namespace"
        " allows 5: remove async, ask for fewer a pod, lower generation.instances.min,"
        " preparation.instances.max or learning.instances.max, or raise the quota"
    )
