"""Asynchronous jobs through an operator that is killed: real functions, real weights, a real API server."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controller.operator_harness import fresh_namespace, job_server
from tests.prerequisites import needs_api_server
from tests.training.killing import start
from tests.training.test_asynchronous import AHEAD, check_journal, check_prompts, entries, replayed
from tests.training.whole_jobs import MakeJob, folder_of, half_written

pytestmark = needs_api_server("no asynchronous job is trained through a real API server")

POINTS = ("taken-2", "begun-4")
"""Where the operator is killed: a step is to be learnt, and another one is to be generated beside learning."""


@pytest.mark.timeout(900)
def test_a_killed_operator_loses_and_doubles_no_group(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, deaths, log = tiny_job("ahead", **AHEAD, steps=5), tmp_path / "deaths.txt", tmp_path / "operator.log"
    control_plane = tmp_path / "control-plane"
    control_plane.mkdir()
    begun: list[dict[str, Any]] = []
    taken: list[dict[str, Any]] = []
    with job_server(control_plane) as server, fresh_namespace(server) as jobs:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        module = "tests.controller.training_operator_process"
        command = [sys.executable, "-m", module, str(tmp_path), str(file.parent), jobs.namespace, str(deaths), *POINTS]
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
