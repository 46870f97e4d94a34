"""Jobs on a real API server where KUBEBUILDER_ASSETS names one (the convention of envtest); else on one that keeps
documents in memory.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.control_plane import ApiServer
from tests.clusters.emulated_functions import Emulation, Held
from tests.clusters.memory_api import memory_api
from tests.controller.operator_harness import Jobs, fresh_namespace, job_server, running_operator, wait_for
from tests.jobs import small_job
from tests.prerequisites import HAS_API_SERVER


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


@contextmanager
def job_held_in(task: str, jobs: Jobs, artifacts: Path, **spec: Any) -> Iterator[tuple[Held, Emulation]]:
    """A running operator whose job has come to a task, which does not end before the test says so."""
    held = Held.task(task)
    emulation = Emulation(holding=held)
    with running_operator(artifacts, emulation):
        jobs.apply(small_job(**spec))
        wait_for(lambda: held.reached)
        yield held, emulation


def recorded_steps(artifacts: Path) -> list[int]:
    (file,) = artifacts.glob("*/runs/job/metrics.jsonl")
    lines = file.read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]
