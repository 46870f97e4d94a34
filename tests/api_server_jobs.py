"""Jobs on a real API server where KUBEBUILDER_ASSETS names one (the convention of envtest); else on one that keeps
documents in memory.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane import ApiServer
from memory_api import memory_api
from operator_harness import Jobs, fresh_namespace, job_server
from requirements import HAS_API_SERVER


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real API server where KUBEBUILDER_ASSETS names one; else one that keeps documents in memory."""
    folder = tmp_path_factory.mktemp("control-plane")
    with job_server(folder) if HAS_API_SERVER else memory_api(folder) as api:
        yield api


@pytest.fixture
def jobs(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """A namespace of the test's own; KUBECONFIG leads to its server."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    with fresh_namespace(server) as jobs:
        yield jobs


def recorded_steps(artifacts: Path) -> list[int]:
    lines = (artifacts / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]
