"""Several operators, and operators that are killed or stop: what a job's user sees of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlhfless_operator.controller.leadership import Election
from rlhfless_operator.training.journal.lease import Lease
from tests.controller.api_server_jobs import job_held_in, recorded_steps
from tests.controller.api_server_jobs import jobs as jobs  # The fixtures.
from tests.controller.api_server_jobs import server as server
from tests.controller.operator_harness import (
    Jobs,
    condition,
    fresh_namespace,
    operator_process,
    running_operator,
    wait_for,
)
from tests.jobs import small_job


def test_an_operator_that_stops_says_so_and_the_next_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    with job_held_in("learn", jobs, tmp_path) as (held, emulation):
        pass  # The operator stops.
    status = jobs.status("job")
    assert (status["phase"], status["reason"]) == ("Interrupted", "OperatorStopped")
    held.over = True
    with running_operator(tmp_path, emulation):
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded"
    assert [step["step"] for step in status["recentSteps"]] == [1, 2, 3]


def test_a_job_that_another_driver_has_waits_for_its_lease(jobs: Jobs, tmp_path: Path) -> None:
    lease = Lease.acquire(str(tmp_path / jobs.namespace / "runs" / "job"))
    with running_operator(tmp_path):
        jobs.apply(small_job())
        status = jobs.wait("job", lambda status: status.get("reason") == "WaitingForLease")
        assert status["phase"] == "Pending"
        assert condition(status, "Progressing")["status"] == "False"
        lease.release()
        jobs.wait_phase("job", "Succeeded")


@pytest.mark.slow
def test_a_killed_operator_loses_and_doubles_no_step(jobs: Jobs, tmp_path: Path) -> None:
    jobs.apply(small_job(steps=12))
    for wanted in (2, 5, 8):
        with operator_process(tmp_path, 0.05, jobs.namespace) as process:
            jobs.wait("job", lambda status, wanted=wanted: status.get("step", 0) >= wanted)
            process.kill()
            process.wait()
    with operator_process(tmp_path, 0.05, jobs.namespace):
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded"
    assert recorded_steps(tmp_path) == list(range(1, 13))
    assert status["driver"]["lease"] == 4


def leader(jobs: Jobs) -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{jobs.namespace}/leases/rlhfless-operator"
    status, answer = jobs.server.request("GET", path)
    return str(answer["spec"].get("holderIdentity") or "") if status == 200 else ""


@pytest.mark.slow
def test_of_two_operators_one_leads_and_the_other_takes_over(jobs: Jobs, tmp_path: Path) -> None:
    with (
        operator_process(tmp_path, 0.05, jobs.namespace, elect=True) as first,
        operator_process(tmp_path, 0.05, jobs.namespace, elect=True) as second,
    ):
        jobs.apply(small_job(steps=40))
        status = jobs.wait("job", lambda status: status.get("step", 0) >= 2)
        leading = leader(jobs)
        assert status["driver"] == {"operator": leading, "lease": 1}
        by_pid = {str(process.pid): process for process in (first, second)}
        by_pid[leading.split("-")[-2]].kill()
        by_pid[leading.split("-")[-2]].wait()
        status = jobs.wait_phase("job", "Succeeded", "Failed")
        assert status["phase"] == "Succeeded"
        assert leader(jobs) not in ("", leading)
        assert status["driver"] == {"operator": leader(jobs), "lease": 2}
    assert recorded_steps(tmp_path) == list(range(1, 41))


@pytest.mark.slow
def test_a_leader_that_stops_lets_the_next_in(jobs: Jobs, tmp_path: Path) -> None:
    election = Election(jobs.namespace, duration=3600, renewal=10, retry=1)
    with running_operator(tmp_path, election=election):
        wait_for(lambda: leader(jobs))
    assert leader(jobs) == ""
    with running_operator(tmp_path, election=election):
        jobs.apply(small_job())
        jobs.wait_phase("job", "Succeeded")


def test_an_operator_that_waits_to_lead_ends_when_told_to(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path, election=Election(jobs.namespace, duration=3600, renewal=10, retry=1)):
        leading = wait_for(lambda: leader(jobs))
        with operator_process(tmp_path, 0.05, jobs.namespace, elect=True) as waiting:
            wait_for(lambda: any(one.status == "LISTEN" for one in psutil.Process(waiting.pid).net_connections()))
            waiting.terminate()
            assert waiting.wait(60) == 0, "the first process of a container is not ended by a signal that it ignores"
        assert leader(jobs) == leading


@pytest.mark.nightly
def test_two_operators_without_an_election_do_not_spoil_a_job(jobs: Jobs, tmp_path: Path) -> None:
    with operator_process(tmp_path, 0.05, jobs.namespace) as first, operator_process(tmp_path, 0.05, jobs.namespace):
        jobs.apply(small_job(steps=12))
        jobs.wait("job", lambda status: status.get("step", 0) >= 3)
        first.kill()
        first.wait()
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded"
    assert recorded_steps(tmp_path) == list(range(1, 13))


@pytest.mark.nightly
def test_operators_with_their_own_namespaces_drive_jobs_of_one_name_side_by_side(jobs: Jobs, tmp_path: Path) -> None:
    with fresh_namespace(jobs.server) as others:
        with (
            operator_process(tmp_path, 0.05, jobs.namespace, elect=True) as own,
            operator_process(tmp_path, 0.05, others.namespace, elect=True),
        ):
            for team in (jobs, others):
                team.apply(small_job(steps=20))
            for team in (jobs, others):
                status = team.wait("job", lambda status: status.get("step", 0) >= 2)
                assert status["driver"] == {"operator": leader(team), "lease": 1}
            own.kill()
            own.wait()
            assert others.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"
            assert jobs.status("job")["phase"] == "Running"  # Nobody else has taken it.
            assert others.status("job")["driver"]["lease"] == 1
        with operator_process(tmp_path, 0.05, jobs.namespace, elect=True):
            assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"


@pytest.mark.slow
def test_the_command_says_what_a_cluster_lacks(jobs: Jobs, tmp_path: Path) -> None:
    """The operator as it is installed: its own platform, its own log. This API server has no Knative."""
    environment = {
        **os.environ,
        "RLHFLESS_FUNCTIONS_IMAGE": "functions",
        "RLHFLESS_NAMESPACES": jobs.namespace,
        "RLHFLESS_ARTIFACTS": str(tmp_path),
        "RLHFLESS_METRICS_PORT": "0",
        "RLHFLESS_LIVENESS_PORT": "0",
    }
    command = [sys.executable, "-m", "rlhfless_operator", "operator", "--lease-namespace", jobs.namespace]
    process = subprocess.Popen([*command, "--leader-elect"], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        jobs.apply(small_job())
        status = jobs.wait("job", lambda status: condition(status, "ServicesReady").get("status") == "False")
        assert status["phase"] == "Pending"
        assert "Knative" in condition(status, "ServicesReady")["message"]
        assert leader(jobs)
    finally:
        process.terminate()
        _, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    lines = [json.loads(line) for line in log.splitlines()]
    assert any("Operator is stopping" in line["message"] for line in lines)
    assert leader(jobs) == "", "the Lease is given back"


def test_a_driver_whose_job_another_operator_has_taken_stops(jobs: Jobs, tmp_path: Path) -> None:
    with job_held_in("learn", jobs, tmp_path) as (held, emulation):
        jobs.wait("job", lambda status: status.get("stage") == "learning")
        code, answer = jobs.patch("job", {"status": {"driver": {"operator": "another", "lease": 9}}}, "/status")
        assert code == 200, answer
        wait_for(lambda: emulation.closed == 1)
        held.over = True
        # Once no other holder of the folder is seen, the job is taken up again.
        status = jobs.wait_phase("job", "Succeeded")
    assert emulation.closed == 2
    assert status["driver"]["lease"] == 2
    assert recorded_steps(tmp_path) == [1, 2, 3]
