"""Jobs whose pods use GPUs in turns, by the operator: what their users are told. Knative is emulated."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.controller.functions import knative_platforms
from rlhfless_operator.controller.main import Operator
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.platforms.pods import stage_pods
from rlhfless_operator.platforms.turns import slot_division, slot_pool
from tests.clusters.control_plane import ApiServer
from tests.clusters.emulated_functions import Emulation
from tests.clusters.knative_emulation import KnativeEmulation
from tests.clusters.knative_thread import knative_beside
from tests.clusters.slot_webhook import giving_slots
from tests.controller.operator_harness import (
    QUICK,
    Jobs,
    RunningOperator,
    condition,
    fresh_namespace,
    job_server,
    wait_for,
)
from tests.jobs import small_job
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("no claims are made")
LIMITS = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with job_server(tmp_path_factory.mktemp("control-plane")) as api:
        yield api


@pytest.fixture(scope="module")
def knative(server: ApiServer) -> Iterator[KnativeEmulation]:
    with knative_beside(server, Emulation()) as running:
        running.admit = giving_slots(running.client)
        yield running


@pytest.fixture
def jobs(
    server: ApiServer, knative: KnativeEmulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Jobs]:
    """A namespace whose jobs an operator runs, in a pool of one slot whose DeviceClass is not there."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.setattr(slot_pool, "_REVIEW_SECONDS", 0.5)
    # The operator of the test before ended with its test, and left its claims in another namespace.
    monkeypatch.setattr(slot_division, "_ABANDONED_SECONDS", 1.0)
    with fresh_namespace(server) as jobs:
        settings = ClusterSettings(
            functions_image="none",
            artifacts=str(tmp_path),
            ingress=knative.url,
            metrics_port=0,
            liveness_port=0,
            pools={"default": PoolSettings(gpus=1, device_class="gpu.test")},
        )
        running = RunningOperator(Operator(settings, knative_platforms, pacing=QUICK))
        try:
            yield jobs
        finally:
            running.stop()
        assert running.error is None, running.error


def test_a_job_tells_of_pods_of_which_kubernetes_says_nothing_until_they_are_ready(
    jobs: Jobs, knative: KnativeEmulation
) -> None:
    knative.pod_status = {"phase": "Pending"}
    try:
        jobs.apply(small_job(steps=1, pods=LIMITS))
        status = jobs.wait("job", lambda found: condition(found, "PodsHealthy").get("status") == "False", "healthy")
    finally:
        knative.pod_status = None
    found = condition(status, "PodsHealthy")
    assert found["reason"] == "PodsFail"
    assert "Pending: the scheduler has not looked at it" in found["message"]
    assert "check that kube-scheduler runs" in found["message"]

    path = f"/api/v1/namespaces/{jobs.namespace}/pods"

    def goes_on() -> bool:
        """As if the scheduler had come back, for which the emulated pods can't wait."""
        _, answer = jobs.server.request("GET", path)
        for pod in answer["items"]:
            if not pod["status"].get("conditions"):
                jobs.server.request("DELETE", f"{path}/{pod['metadata']['name']}?gracePeriodSeconds=0")
        return condition(jobs.status("job"), "PodsHealthy").get("status") == "True"

    wait_for(goes_on)
    assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"


def test_a_job_tells_why_a_node_does_not_prepare_its_pods(
    jobs: Jobs, knative: KnativeEmulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_pods, "_PREPARATION_SECONDS", 0.5)
    conditions = [
        {"type": "PodScheduled", "status": "True"}, {"type": "PodReadyToStartContainers", "status": "False"}
    ]  # fmt: skip
    knative.pod_status = {"phase": "Pending", "conditions": conditions}
    why = "Failed to prepare dynamic resources: dial unix gpu.test.sock: connect: connection refused"
    told: set[str] = set()
    path = f"/api/v1/namespaces/{jobs.namespace}/pods"

    def says_so() -> bool:
        """As the kubelet does, of every pod that there is."""
        _, answer = jobs.server.request("GET", path)
        for pod in answer["items"]:
            for kind, reason, message in (
                ("Normal", "Scheduled", "Successfully assigned"),
                ("Warning", "FailedPrepareDynamicResources", why),
            ):
                if pod["metadata"]["name"] not in told:
                    event = event_of(pod, kind, reason, message)
                    status, made = jobs.server.request("POST", f"/api/v1/namespaces/{jobs.namespace}/events", event)
                    assert status == 201, made
            told.add(pod["metadata"]["name"])
        return why in condition(jobs.status("job"), "PodsHealthy").get("message", "")

    try:
        jobs.apply(small_job(steps=1, pods=LIMITS))
        wait_for(says_so, lambda: str(jobs.status("job")))
    finally:
        knative.pod_status = None
    found = condition(jobs.status("job"), "PodsHealthy")
    assert found["status"] == "False"
    assert "(its ResourceClaims: rlhfless-default-0-0): FailedPrepareDynamicResources: " in found["message"]
    assert "check that the DRA driver of its GPUs runs on the pod's node" in found["message"]
    # The driver has come back, for which the emulated pods can't wait.
    _, answer = jobs.server.request("GET", path)
    for pod in answer["items"]:
        jobs.server.request("DELETE", f"{path}/{pod['metadata']['name']}?gracePeriodSeconds=0")
    assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"
    assert condition(jobs.status("job"), "PodsHealthy")["status"] == "True"


def event_of(pod: dict[str, Any], kind: str, reason: str, message: str) -> dict[str, Any]:
    """An event of a pod, of now."""
    about = {field: pod["metadata"][field] for field in ("name", "namespace", "uid")}
    return {
        "metadata": {"generateName": pod["metadata"]["name"] + "-", "namespace": about["namespace"]},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
        "type": kind,
        "reason": reason,
        "message": message,
        "lastTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def test_a_device_class_that_is_not_there_is_told_with_the_remedy(jobs: Jobs) -> None:
    jobs.apply(small_job(steps=1, pods=LIMITS))
    told = "pool default: pools.default.deviceClass is gpu.test, but there is no such DeviceClass; the cluster has none"
    status = jobs.wait("job", lambda found: told in condition(found, "ClusterReady").get("message", ""), "not told:")
    assert "Install the DRA driver of these GPUs" in condition(status, "ClusterReady")["message"]
    assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded", "emulated pods need no driver"


def test_an_instance_that_needs_more_than_a_group_has_is_told_before_anything_runs(jobs: Jobs) -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    jobs.apply(small_job(steps=1, learning={"pods": limits}))
    told = "learning requests 2 nvidia.com/gpu per pod, but pools.default.gpusPerGroup is 1"
    status = jobs.wait("job", lambda found: told in condition(found, "ClusterReady").get("message", ""), "not told:")
    assert condition(status, "ClusterReady")["reason"] == "PreflightFailed"
    assert "pools.default.gpusPerGroup: 2." in condition(status, "ClusterReady")["message"]
