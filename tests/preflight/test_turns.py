"""What the preflight says of pools whose GPUs pods use in turns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.preflight import stages_of
from rlhfless_operator.preflight.checks import check_capacity, check_quota
from rlhfless_operator.preflight.devices import DynamicResources
from rlhfless_operator.preflight.turns import check_instances, check_pool, pools_with_turns, say_turns
from tests.preflight.test_devices import NVIDIA, device_class, gpu, resource_slice

EIGHT = [resource_slice("a", *[gpu()] * 4), resource_slice("b", *[gpu()] * 4)]
FULL = DynamicResources("v1.34.4", ("v1",), {"gpu.nvidia.com": device_class(NVIDIA)}, EIGHT)


def pool(gpus: int = 8, **rest: Any) -> PoolSettings:
    return PoolSettings.model_validate({"gpus": gpus, "deviceClass": "gpu.nvidia.com", **rest})


def settings(limit: int, **rest: Any) -> ClusterSettings:
    pods = PodsSpec.model_validate({"resources": {"limits": {"nvidia.com/gpu": limit}}})
    return ClusterSettings(functions_image="functions", pods=pods, pools={"default": pool(**rest)})


def test_a_pool_whose_devices_are_offered_is_right() -> None:
    finding = check_pool("default", pool(gpusPerGroup=4), FULL)
    assert finding.verdict == "ok"
    assert "offer 8 devices of gpu.nvidia.com in groups of 4" in finding.message


def test_a_count_that_is_an_upper_bound_is_told_as_one() -> None:
    some = device_class("device.driver == 'gpu.nvidia.com' && isGood(device)")
    finding = check_pool("default", pool(), DynamicResources("v1.34.4", ("v1",), {"gpu.nvidia.com": some}, EIGHT))
    assert finding.verdict == "ok" and "at most 8 devices" in finding.message


@pytest.mark.parametrize(
    ("wrong", "found", "verdict", "message", "remedy"),
    [
        (
            {},
            DynamicResources("v1.33.2", ("v1beta1", "v1beta2")),
            "error",
            "pools.default.deviceClass is gpu.nvidia.com, but the API server (v1.33.2) has no resource.k8s.io/v1, only"
            " v1beta1, v1beta2",
            "Upgrade to Kubernetes 1.34",
        ),
        ({}, DynamicResources("v1.29.0", ()), "error", "(v1.29.0) has no resource.k8s.io/v1", "Kubernetes 1.34"),
        (
            {"deviceClass": "gpu.other"},
            FULL,
            "error",
            "pools.default.deviceClass is gpu.other, but there is no such DeviceClass; the cluster has gpu.nvidia.com",
            "Name one of these",
        ),
        ({}, DynamicResources("v1.34.4", ("v1",), {}, []), "error", "the cluster has none", "Install the DRA driver"),
        (
            {},
            DynamicResources("v1.34.4", ("v1",), FULL.classes, []),
            "error",
            "no ResourceSlice offers a device of DeviceClass gpu.nvidia.com",
            "kubectl get resourceslices",
        ),
        (
            {"gpusPerGroup": 8},
            FULL,
            "error",
            "pools.default.gpusPerGroup is 8, but no node has more than 4 of gpu.nvidia.com",
            "pools.default.gpusPerGroup: 4 or less",
        ),
        (
            {"gpus": 16},
            FULL,
            "warning",
            "pools.default.gpus is 16, but ResourceSlices offer 8 devices of gpu.nvidia.com",
            "pools.default.gpus: 8, or add nodes",
        ),
        (
            {"gpus": 9, "gpusPerGroup": 3},
            FULL,
            "warning",
            "offer 6 devices of gpu.nvidia.com in groups of 3",
            "pools.default.gpus: 6",
        ),
        (
            {},
            DynamicResources("v1.34.4", ("v1",), refusal="deviceclasses is forbidden"),
            "unknown",
            "can't be counted: deviceclasses is forbidden",
            "may list deviceclasses and resourceslices",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(
    wrong: dict[str, Any], found: DynamicResources, verdict: str, message: str, remedy: str
) -> None:
    finding = check_pool("default", pool(**wrong), found)
    assert (finding.check, finding.verdict) == ("pool default", verdict)
    assert message in finding.message
    assert remedy in finding.remedy


def test_an_instance_needs_no_more_than_a_group_has() -> None:
    fits, large = settings(2, gpusPerGroup=2), settings(4, gpusPerGroup=2)
    assert check_instances("default", fits.pools["default"], stages_of(fits, None, "team")).verdict == "ok"
    finding = check_instances("default", large.pools["default"], stages_of(large, None, "team"))
    assert finding.verdict == "error"
    assert finding.message == "every stage requests 4 nvidia.com/gpu per pod, but pools.default.gpusPerGroup is 2"
    assert finding.remedy.endswith("pools.default.gpusPerGroup: 4.")


def test_a_jobs_own_pool_says_what_its_instances_use_in_turns(tiny_job: Callable[..., Path]) -> None:
    cluster = settings(1)
    stages = stages_of(cluster, load_job(tiny_job()), "team")
    assert {stage.slots.pool for stage in stages if stage.slots} == {"default"}
    elsewhere = stages_of(cluster, load_job(tiny_job(pool="other")), "team")
    assert not [stage for stage in elsewhere if stage.slots]


def test_pods_that_take_turns_ask_nodes_and_quotas_for_no_gpu() -> None:
    """A DRA driver's nodes offer none of the device plugin's."""
    stages = stages_of(settings(2), None, "team")
    assert check_capacity([{"cpu": "8"}], stages).verdict == "ok"
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"requests.nvidia.com/gpu": "0"}}}
    assert check_quota([quota], stages, "team").verdict == "ok"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (DynamicResources("v1.31.0", ()), "but the API server (v1.31.0) has no resource.k8s.io/v1"),
        (DynamicResources("v1.34.4", ("v1",)), "v1.34.4 supports the ResourceClaims that this needs"),
        (DynamicResources("v1.34.4", ("v1",), {}, []), "lacks a DRA driver for its GPUs: it has no DeviceClass"),
        (DynamicResources("v1.34.4", ("v1",), FULL.classes, []), "its DeviceClasses have no devices"),
        (FULL, "the cluster has devices of DeviceClass gpu.nvidia.com"),
    ],
)
def test_without_turns_what_they_would_bring_is_said_without_alarm(found: DynamicResources, message: str) -> None:
    finding = say_turns(found)
    assert finding.verdict == "ok"
    assert "pods use GPUs in turns" in finding.message and message in finding.message


def test_only_pools_with_a_device_class_take_turns() -> None:
    assert list(pools_with_turns({"a": pool(), "b": PoolSettings(gpus=4)})) == ["a"]
