"""The operator against a real API server: what a user of `kubectl` sees. The functions are emulated."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import ApiServer, control_plane, wait_until
from emulated_functions import Emulation
from operator_harness import Jobs, condition, jobs_path, running_operator, small_job
from rlhfless_operator.crd import crd

ASSETS = os.environ.get("KUBEBUILDER_ASSETS")

pytestmark = pytest.mark.skipif(
    ASSETS is None,
    reason="the operator is not run against a real API server: KUBEBUILDER_ASSETS names no etcd and kube-apiserver",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    assert ASSETS is not None
    folder = tmp_path_factory.mktemp("control-plane")
    with control_plane(Path(ASSETS), folder) as api:
        status, answer = api.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd())
        assert status == 201, answer
        wait_until(lambda: api.request("GET", jobs_path()), folder)
        yield api


@pytest.fixture
def jobs(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """A namespace of the test's own; KUBECONFIG leads to its server."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    status, answer = server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    assert status == 201, answer
    return Jobs(server, namespace)


def test_a_job_that_is_applied_succeeds(jobs: Jobs, tmp_path: Path) -> None:
    emulation = Emulation()
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job())
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    assert (status["step"], status["progress"]) == (3, "3/3")
    assert status["reward"] == 0.75
    assert float(status["cost"]) > 0
    assert status["observedGeneration"] == 1
    assert [step["step"] for step in status["recentSteps"]] == [1, 2, 3]
    assert condition(status, "Complete")["status"] == "True"
    assert condition(status, "Accepted")["reason"] == "Valid"
    assert condition(status, "ServicesReady")["status"] == "True"
    assert condition(status, "Progressing")["status"] == "False"
    assert (tmp_path / "runs" / "job" / "model" / "README.md").exists()
    assert (emulation.opened, emulation.closed, emulation.removed) == (1, 1, 1)
