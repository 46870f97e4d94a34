"""The operator with its Knative platform: what a job's user is told of the cluster. Knative is emulated."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.controller.functions import knative_platforms
from rlhfless_operator.controller.main import Operator
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from tests.clusters.control_plane import ApiServer
from tests.clusters.emulated_functions import Emulation
from tests.clusters.knative_emulation import KnativeEmulation
from tests.clusters.knative_thread import knative_beside
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

UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        }
    ],
}

pytestmark = needs_api_server("the operator meets no API server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with job_server(tmp_path_factory.mktemp("control-plane")) as api:
        yield api


@pytest.fixture(scope="module")
def knative(server: ApiServer) -> Iterator[KnativeEmulation]:
    with knative_beside(server, Emulation()) as running:
        yield running


@contextmanager
def operated(server: ApiServer, knative: KnativeEmulation, folder: Path, **given: Any) -> Iterator[Jobs]:
    """A namespace whose jobs an operator with these settings runs."""
    with fresh_namespace(server) as jobs:
        settings = ClusterSettings(
            functions_image="none",
            artifacts=str(folder),
            ingress=knative.url,
            knative_namespace=f"knative-{uuid.uuid4().hex[:8]}",
            metrics_port=0,
            liveness_port=0,
            **given,
        )
        running = RunningOperator(Operator(settings, knative_platforms, pacing=QUICK))
        try:
            yield jobs
        finally:
            running.stop()
        assert running.error is None, running.error


@pytest.fixture
def jobs(
    server: ApiServer, knative: KnativeEmulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Jobs]:
    """A namespace whose jobs an operator runs."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    with operated(server, knative, tmp_path) as jobs:
        yield jobs


def told(jobs: Jobs, kind: str, status: str) -> dict[str, Any]:
    """A condition, once it is so."""
    whole = jobs.wait("job", lambda found: condition(found, kind).get("status") == status, f"{kind} is not {status}:")
    return condition(whole, kind)


def test_a_job_tells_what_the_preflight_finds(jobs: Jobs) -> None:
    jobs.apply(small_job(steps=1))
    found = told(jobs, "ClusterReady", "False")
    assert found["reason"] == "PreflightFailed"
    assert "has no ConfigMaps of Knative Serving\nInstall Knative Serving, or name its namespace" in found["message"]
    assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded", "what can be done is done"


def test_a_job_tells_why_its_pods_do_not_start_and_when_they_do(jobs: Jobs, knative: KnativeEmulation) -> None:
    knative.pod_status = UNSCHEDULABLE
    try:
        jobs.apply(small_job(steps=1))
        found = told(jobs, "PodsHealthy", "False")
    finally:
        knative.pod_status = None
    assert found["reason"] == "PodsFail"
    assert "Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu." in found["message"]
    assert "wait until resources are free, add nodes" in found["message"]

    path = f"/api/v1/namespaces/{jobs.namespace}/pods"

    def goes_on() -> bool:
        """As if a node had come, for which the emulated pods that have none can't wait."""
        _, answer = jobs.server.request("GET", path)
        for pod in answer["items"]:
            if any(each.get("reason") == "Unschedulable" for each in pod["status"].get("conditions", [])):
                jobs.server.request("DELETE", f"{path}/{pod['metadata']['name']}?gracePeriodSeconds=0")
        return condition(jobs.status("job"), "PodsHealthy").get("status") == "True"

    wait_for(goes_on)
    assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"


def test_jobs_whose_pods_go_slowly_do_not_pass_gpus_to_each_other_in_each_step(
    server: ApiServer, knative: KnativeEmulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the webhook a pod takes 31 s to go, which is far more than there is between two uses of one."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    one = {"instances": {"min": 1, "max": 1}}
    with operated(server, knative, tmp_path, pools={"default": PoolSettings(gpus=3)}) as jobs:
        jobs.apply(small_job("first", pods=gpu, generation=one, steps=10_000))
        jobs.wait("first", lambda found: found.get("step", 0) > 0, "no step is done:")
        jobs.apply(small_job("second", pods=gpu, generation=one))
        whole = jobs.wait(
            "second", lambda found: condition(found, "Progressing").get("reason") == "WaitingForTurn", "does not wait:"
        )
        message = condition(whole, "Progressing")["message"]
        assert message.startswith("waits for its turn on 3 GPUs of pool default: job first holds 3, for ")
        assert whole.get("step", 0) == 0
        jobs.patch("first", {"spec": {"suspend": True}})
        assert jobs.wait_phase("second", "Succeeded", "Failed")["phase"] == "Succeeded"
        assert condition(jobs.status("first"), "Progressing")["reason"] == "Suspended"
