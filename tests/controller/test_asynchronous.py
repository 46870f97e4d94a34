"""Asynchronous jobs through an operator that is killed, suspended or out of money: real functions, real weights, a real
API server.
"""

import asyncio
import json
import signal
import sys
import threading
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_functions.api import Event, RunRequest, Samples
from rlhfless_operator.controller.conditions import Tell
from rlhfless_operator.controller.context import MakePlatform
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.base import StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.pool_member import PoolMember
from tests.clusters.control_plane import ApiServer
from tests.clusters.emulated_functions import Emulation, Held
from tests.controller.operator_harness import Jobs, fresh_namespace, job_server, jobs_path, running_operator, wait_for
from tests.controller.test_training import LocalFunctions
from tests.jobs import small_job
from tests.prerequisites import needs_api_server
from tests.training.asynchronous.test_loop import AHEAD, check_journal, check_prompts, entries, replayed
from tests.training.killing import start
from tests.training.steady_ledger import STEP_SECONDS
from tests.training.steady_ledger import steady_learning as steady_learning  # A fixture.
from tests.training.whole_jobs import MakeJob, folder_of, half_written

pytestmark = needs_api_server("no asynchronous job is trained through a real API server")

POINTS = ("taken-2", "begun-4")
"""Where the operator is killed: a step is to be learnt, and another one is to be generated beside learning."""


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_killed_operator_loses_and_doubles_no_group(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, log = tiny_job("ahead", **AHEAD, steps=5), tmp_path / "operator.log"
    control_plane = tmp_path / "control-plane"
    control_plane.mkdir()
    begun: list[dict[str, Any]] = []
    taken: list[dict[str, Any]] = []
    with job_server(control_plane) as server, fresh_namespace(server) as jobs:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        # A thread of the job dies, which can write in the job's folder alone.
        deaths = tmp_path / jobs.namespace / "runs" / "ahead" / "deaths.txt"
        deaths.parent.mkdir(parents=True)
        module = "tests.controller.training_operator_process"
        command = [sys.executable, "-m", module, str(tmp_path), str(file.parent), jobs.namespace, str(deaths), *POINTS]
        show_where(file, tmp_path, jobs)
        jobs.apply(yaml.safe_load(file.read_text()))
        for _ in POINTS:
            assert start(command, log).wait() == -signal.SIGKILL, log.read_text()
            assert entries(file, "begun")[: len(begun)] == begun, "staleness is what it was"
            assert entries(file, "taken")[: len(taken)] == taken
            begun, taken = entries(file, "begun"), entries(file, "taken")
        operator = start(command, log)
        try:
            status = jobs.wait_phase("ahead", "Succeeded", "Failed", seconds=400)
        finally:
            operator.terminate()
            operator.wait()
    assert status["phase"] == "Succeeded", status
    assert sorted(deaths.read_text().split()) == sorted(POINTS)
    assert status["driver"]["lease"] == len(POINTS) + 1
    assert entries(file, "begun")[: len(begun)] == begun
    assert entries(file, "taken")[: len(taken)] == taken
    check_journal(file, 5, 1)
    check_prompts(file)
    assert half_written(folder_of(file)) == []
    assert "5 steps taken again: the same weights bit for bit" in replayed(file)


def show_where(file: Path, artifacts: Path, jobs: Jobs) -> None:
    """Let the folder of a local run lead to the one that the operator gives the job."""
    folder_of(file).parent.symlink_to(artifacts / jobs.namespace / "runs")


def columns(server: ApiServer, path: str) -> list[Any]:
    """What `kubectl get` shows of the only job."""
    table = "application/json;as=Table;v=v1;g=meta.k8s.io"
    asked = urllib.request.Request(
        server.url + path, headers={"Authorization": f"Bearer {server.token}", "Accept": table}
    )
    with urllib.request.urlopen(asked, context=server.context, timeout=30) as answer:
        (row,) = json.load(answer)["rows"]
    return list(row["cells"])


def test_the_resource_says_what_is_under_way_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learning, generating = (
        Held(lambda request: (request.task, request.key.step) == ("learn", 1)),
        Held(lambda request: (request.task, request.key.step) == ("generate", 3)),
    )
    emulation = Emulation(holding=lambda request: learning(request) or generating(request))
    control_plane = tmp_path / "control-plane"
    control_plane.mkdir()
    with job_server(control_plane) as server, fresh_namespace(server) as jobs:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        with running_operator(tmp_path, emulation) as operator:
            jobs.apply(small_job(**{"async": {"maxStaleness": 2}}))
            both = "generation 3 · learning 1"
            # The operator patches the two fields one after the other.
            jobs.wait("job", lambda status: (status.get("stage"), status.get("stages")) == ("learning", both))
            assert "generation 3 · learning 1" in columns(server, jobs_path(jobs.namespace))
            exposition = operator.get(operator.operator.metrics_port, "/metrics")
            for stage in ("generation", "learning"):
                assert f'steps_under_way{{job="job",namespace="{jobs.namespace}",stage="{stage}"}} 1.0' in exposition
            generating.over = True
            jobs.wait("job", lambda status: status.get("stages") == "learning")
            learning.over = True
            assert "stages" not in jobs.wait_phase("job", "Succeeded", "Failed") or not jobs.status("job")["stages"]


class Stalling(LocalFunctions):
    """Functions of this machine whose generation of a step stops once, when it has told of its first samples. The step
    before it is not learnt until it is let go, because the step after it would begin then."""

    step = 3
    stalled = threading.Event()
    let_go = threading.Event()

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        if (request.key.stage, request.key.step) == ("learning", self.step - 1) and not self.let_go.is_set():
            await asyncio.Event().wait()
        async with aclosing(super().run(request)) as events:
            async for event in events:
                yield event
                sink = event.of if isinstance(event, Samples) else None
                if sink is not None and f"step-{self.step:06d}" in sink and not self.stalled.is_set():
                    self.stalled.set()
                    await asyncio.Event().wait()


@asynccontextmanager
async def stalling_functions(client: Any, settings: ClusterSettings) -> AsyncIterator[MakePlatform]:
    def make(member: PoolMember, job: RLHFJob, root: str, on_state: StateListener, tell: Tell) -> JobPlatform:
        functions = Stalling(
            keep_alive={"generation": 60.0, "preparation": 60.0, "learning": 60.0},
            threads={"generation": 1, "preparation": 1, "learning": 1},
            log_path=Path(root) / "logs" / "instances.jsonl",
            on_state=on_state,
        )
        return JobPlatform(functions, member)

    yield make


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("warm_start", "steady_learning")
def test_a_job_that_is_suspended_in_mid_rollout_and_then_by_its_budget_loses_and_doubles_no_group(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is money for four steps and a half, of which the driver that is suspended may spend some for nothing."""
    budget = Decimal("4.5") * int(STEP_SECONDS)
    prices = {"instanceHour": "3600"}
    file = tiny_job("ahead", **AHEAD, steps=6, prices=prices, budget={"money": str(budget)})
    control_plane = tmp_path / "control-plane"
    control_plane.mkdir()
    Stalling.stalled.clear()
    Stalling.let_go.clear()
    with job_server(control_plane) as server, fresh_namespace(server) as jobs:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        show_where(file, tmp_path, jobs)
        with running_operator(tmp_path, open_platforms=stalling_functions, files=file.parent):
            jobs.apply(yaml.safe_load(file.read_text()))
            wait_for(Stalling.stalled.is_set, lambda: str(jobs.status("ahead")), seconds=300)
            jobs.patch("ahead", {"spec": {"suspend": True}})
            jobs.wait_phase("ahead", "Suspended", seconds=300)
            begun, taken = entries(file, "begun"), entries(file, "taken")
            assert [entry["step"] for entry in begun] == [1, 2, 3]
            assert not (folder_of(file) / "results" / "step-000003" / "batch.json").exists(), "in mid-rollout"

            Stalling.let_go.set()
            jobs.patch("ahead", {"spec": {"suspend": False}})
            status = jobs.wait(
                "ahead",
                lambda status: status["phase"] == "Failed" or status.get("reason") == "BudgetExhausted",
                seconds=400,
            )
            assert status["phase"] == "Suspended", status
            assert 2 <= status["step"] < 6
            assert Decimal(status["cost"]) <= budget
            assert len(entries(file, "begun")) == status["step"], "what was begun is learnt from"

            jobs.patch("ahead", {"spec": {"budget": {"money": str(10 * budget)}}})
            status = jobs.wait_phase("ahead", "Succeeded", "Failed", seconds=400)
    assert status["phase"] == "Succeeded", status
    assert entries(file, "begun")[: len(begun)] == begun, "staleness is what it was"
    assert entries(file, "taken")[: len(taken)] == taken
    check_journal(file, 6, 1)
    check_prompts(file)
    assert half_written(folder_of(file)) == []
    assert "6 steps taken again: the same weights bit for bit" in replayed(file)
