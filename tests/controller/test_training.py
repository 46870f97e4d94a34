"""A job that is applied trains as `rlhfless run` trains it: real functions, real weights, a real API server."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_operator.controller.conditions import Tell
from rlhfless_operator.controller.context import MakePlatform
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.local_run import run_locally
from rlhfless_operator.platforms.base import StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.platforms.pool_member import PoolMember
from tests.controller.operator_harness import fresh_namespace, job_server, running_operator
from tests.prerequisites import needs_api_server
from tests.training.rounds import rounds_job
from tests.training.steady_ledger import steady_costs as steady_costs  # A fixture.
from tests.training.whole_jobs import MakeJob, assert_equal_weights, weights_in

pytestmark = needs_api_server("no job is trained through a real API server")


class LocalFunctions(LocalPlatform):
    """Functions as processes of this machine, for an operator."""

    async def open(self) -> None:
        """Processes are started when they are needed."""

    async def remove(self) -> None:
        """Nothing is left once it is closed."""


@asynccontextmanager
async def local_functions(client: Any, settings: ClusterSettings) -> AsyncIterator[MakePlatform]:
    def make(member: PoolMember, job: RLHFJob, root: str, on_state: StateListener, tell: Tell) -> JobPlatform:
        functions = LocalFunctions(
            keep_alive={"generation": 60.0, "preparation": 60.0, "learning": 60.0},
            threads={"generation": 1, "preparation": 1, "learning": 1},
            log_path=Path(root) / "logs" / "instances.jsonl",
            on_state=on_state,
        )
        return JobPlatform(functions, member)

    yield make


def _grpo_job(make: MakeJob) -> Path:
    return make(steps=2, artifacts={"uri": "runs"})


def _dapo_job(make: MakeJob) -> Path:
    return rounds_job(make, "tiny", artifacts={"uri": "runs"})


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("warm_start", "steady_costs")
def test_a_job_that_its_budget_suspended_comes_to_the_weights_of_one_that_never_stopped(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_job(steps=6, artifacts={"uri": "runs"})
    laptop = tmp_path / "laptop" / "tiny"
    job = load_job(file).resolve_paths(file.parent)
    forecast = Decimal(asyncio.run(run_locally(job, str(laptop), threads=1))["cost"])

    control_plane = tmp_path / "control-plane"
    control_plane.mkdir()
    with job_server(control_plane) as server, fresh_namespace(server) as jobs:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        with running_operator(tmp_path / "cluster", open_platforms=local_functions, files=file.parent):
            document = yaml.safe_load(file.read_text())
            document["spec"]["budget"] = {"money": f"{forecast / 2:f}"}
            jobs.apply(document)
            stopped = jobs.wait_phase("tiny", "Suspended", "Succeeded", "Failed", seconds=400)
            jobs.patch("tiny", {"spec": {"budget": {"money": "1000"}}})
            status = jobs.wait_phase("tiny", "Succeeded", "Failed", seconds=400)
    assert (stopped["phase"], stopped["reason"]) == ("Suspended", "BudgetExhausted"), stopped
    assert stopped["step"] < 6
    assert Decimal(stopped["cost"]) <= forecast / 2
    assert status["phase"] == "Succeeded", status
    assert_equal_weights(weights_in(tmp_path / "cluster" / jobs.namespace / "runs" / "tiny"), weights_in(laptop))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("make_job", [_grpo_job, _dapo_job], ids=["grpo", "dapo in rounds"])
def test_the_same_document_and_seed_give_the_same_weights(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: Callable[[MakeJob], Path]
) -> None:
    file = make_job(tiny_job)
    laptop = tmp_path / "laptop" / "tiny"
    job = load_job(file).resolve_paths(file.parent)

    # In the main thread, where alone signals can be handled.
    assert threading.current_thread() is threading.main_thread()
    asyncio.run(run_locally(job, str(laptop), threads=1))

    control_plane = tmp_path / "control-plane"
    control_plane.mkdir()
    with job_server(control_plane) as server, fresh_namespace(server) as jobs:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        with running_operator(tmp_path / "cluster", open_platforms=local_functions, files=file.parent):
            jobs.apply(yaml.safe_load(file.read_text()))
            status = jobs.wait_phase("tiny", "Succeeded", "Failed", seconds=400)
    assert status["phase"] == "Succeeded", status
    cluster = tmp_path / "cluster" / jobs.namespace / "runs" / "tiny"
    assert_equal_weights(weights_in(cluster), weights_in(laptop))
    left = {path.name for path in laptop.iterdir()} - {path.name for path in cluster.iterdir()}
    assert left == set(), "the very layout of a laptop's folder"
    assert status["reward"] == round(json.loads((laptop / "status.json").read_text())["reward"], 4)
