"""The operator against an API server: what a user of `kubectl` sees. The functions are emulated.

KUBEBUILDER_ASSETS names a folder with etcd and kube-apiserver (the convention of envtest). Without them the tests make
do with a server that keeps documents in memory.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from control_plane import ApiServer
from emulated_functions import Emulation
from memory_api import memory_api
from operator_harness import (
    Jobs,
    condition,
    fresh_namespace,
    job_server,
    operator_process,
    running_operator,
    small_job,
    wait_for,
)
from rlhfless_functions.api import Failed, RunRequest
from rlhfless_operator.controller.leadership import Election
from rlhfless_operator.platforms.base import TaskFailedError
from rlhfless_operator.training.lease import Lease

ASSETS = os.environ.get("KUBEBUILDER_ASSETS")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real API server where KUBEBUILDER_ASSETS names one; else one that keeps documents in memory."""
    folder = tmp_path_factory.mktemp("control-plane")
    with memory_api(folder) if ASSETS is None else job_server(ASSETS, folder) as api:
        yield api


@pytest.fixture
def jobs(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """A namespace of the test's own; KUBECONFIG leads to its server."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    with fresh_namespace(server) as jobs:
        yield jobs


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


STAGES = ("materialize", "generate", "prepare", "learn", "export")


class Held:
    """Lets tasks of one kind wait."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, request: RunRequest) -> bool:
        if request.task != self.task or self.open.is_set():
            return False
        self.reached.set()
        return True


@pytest.mark.parametrize("task", STAGES)
def test_a_job_that_is_deleted_in_any_stage_is_gone_at_once(jobs: Jobs, tmp_path: Path, task: str) -> None:
    held = Held(task)
    emulation = Emulation(holding=held)
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job())
        wait_for(held.reached.is_set)
        job = jobs.get("job")
        assert job is not None
        assert job["metadata"]["finalizers"] == ["rlhfless.io/driver"]
        jobs.delete("job")
        jobs.wait_gone("job")
        assert emulation.closed == 1
    lease = json.loads(max((tmp_path / "runs" / "job" / "leases").iterdir()).read_text())
    assert lease["released"]


def test_suspend_lets_go_of_everything_and_resume_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    held = Held("learn")
    emulation = Emulation(holding=held)
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job())
        wait_for(held.reached.is_set)
        jobs.patch("job", {"spec": {"suspend": True}})
        status = jobs.wait_phase("job", "Suspended")
        assert (emulation.closed, emulation.removed) == (1, 1)
        assert condition(status, "Suspended")["status"] == "True"
        assert condition(status, "Progressing")["reason"] == "Suspended"
        assert status["observedGeneration"] == 2
        wait_for(lambda: "finalizers" not in (jobs.get("job") or {})["metadata"], lambda: str(jobs.get("job")))
        held.open.set()
        jobs.patch("job", {"spec": {"suspend": False}})
        status = jobs.wait_phase("job", "Succeeded", "Failed")
        assert status["phase"] == "Succeeded"
        assert condition(status, "Suspended")["status"] == "False"
    steps = [request.key.step for request in emulation.requests if request.task == "generate"]
    assert steps == [1, 2, 3], "what was generated before is not generated again"
    assert ("Suspended", "job") in jobs.events()


def test_a_job_that_is_made_suspended_waits(jobs: Jobs, tmp_path: Path) -> None:
    emulation = Emulation()
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job(suspend=True))
        jobs.wait_phase("job", "Suspended")
        assert emulation.opened == 0
        jobs.delete("job")
        jobs.wait_gone("job")


def test_more_steps_make_a_finished_job_go_on(jobs: Jobs, tmp_path: Path) -> None:
    emulation = Emulation()
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job(steps=1))
        jobs.wait_phase("job", "Succeeded")
        jobs.patch("job", {"spec": {"steps": 2}})
        status = jobs.wait("job", lambda status: status.get("progress") == "2/2" and status["phase"] == "Succeeded")
        assert status["observedGeneration"] == 2
        jobs.patch("job", {"spec": {"ttlAfterFinished": "1h"}})
        jobs.wait("job", lambda status: status["observedGeneration"] == 3)
    assert emulation.opened == 2, "a change that asks for no work starts none"


def test_a_finished_job_is_deleted_after_its_time(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path):
        jobs.apply(small_job(steps=1, ttlAfterFinished="0s"))
        jobs.wait_gone("job")
    assert (tmp_path / "runs" / "job" / "model" / "README.md").exists(), "the work stays"


def test_a_job_that_takes_too_long_fails_and_goes_on_when_it_may(jobs: Jobs, tmp_path: Path) -> None:
    held = Held("learn")
    with running_operator(tmp_path, Emulation(holding=held)):
        jobs.apply(small_job(activeDeadline="500ms"))
        status = jobs.wait_phase("job", "Failed")
        assert condition(status, "Failed")["reason"] == "DeadlineExceeded"
        assert "raise it to go on" in status["message"]
        held.open.set()
        jobs.patch("job", {"spec": {"activeDeadline": "1h"}})
        jobs.wait_phase("job", "Succeeded")


def test_internal_failures_are_counted_and_a_finished_step_forgives_them(jobs: Jobs, tmp_path: Path) -> None:
    failures: list[int] = []

    def fail_twice_a_step(request: RunRequest) -> None:
        if request.task == "learn" and failures.count(request.key.step) < 2:
            failures.append(request.key.step)
            raise RuntimeError("a bug")

    with running_operator(tmp_path, Emulation(before=fail_twice_a_step)):
        jobs.apply(small_job(backoffLimit=2))
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    assert failures == [1, 1, 2, 2, 3, 3]
    assert status.get("restarts", 0) == 0


def test_too_many_internal_failures_in_a_row_end_the_job(jobs: Jobs, tmp_path: Path) -> None:
    calls: list[RunRequest] = []

    def fail(request: RunRequest) -> None:
        if request.task == "learn":
            calls.append(request)
            raise RuntimeError("a bug")

    with running_operator(tmp_path, Emulation(before=fail)):
        jobs.apply(small_job(backoffLimit=2))
        status = jobs.wait_phase("job", "Failed")
        assert len(calls) == 3
        assert condition(status, "Failed")["reason"] == "BackoffLimitExceeded"
        assert "RuntimeError: a bug" in status["message"]
        assert ("Restarting", "job") in wait_for(jobs.events)
        jobs.patch("job", {"spec": {"backoffLimit": 3}})
        jobs.wait("job", lambda status: status["restarts"] == 3)


def test_a_stage_that_cannot_be_done_fails_the_job_and_suspending_it_allows_another_try(
    jobs: Jobs, tmp_path: Path
) -> None:
    mended = threading.Event()

    def fail(request: RunRequest) -> None:
        if request.task == "materialize" and not mended.is_set():
            raise TaskFailedError(Failed(reason="data_invalid", message="data.source is no dataset", retryable=False))

    with running_operator(tmp_path, Emulation(before=fail)):
        jobs.apply(small_job())
        status = jobs.wait_phase("job", "Failed")
        assert condition(status, "Failed")["reason"] == "TrainingFailed"
        assert status["message"] == "data.source is no dataset"
        assert status.get("restarts", 0) == 0
        mended.set()
        jobs.patch("job", {"spec": {"suspend": True}})
        jobs.wait_phase("job", "Suspended")
        jobs.patch("job", {"spec": {"suspend": False}})
        jobs.wait_phase("job", "Succeeded")


def test_an_invalid_job_is_refused_with_remedies_and_accepted_once_it_is_mended(jobs: Jobs, tmp_path: Path) -> None:
    emulation = Emulation()
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job(rewards=[{"name": "right", "math": {}, "memory": "9999999Ti"}]))
        status = jobs.wait_phase("job", "Failed")
        accepted = condition(status, "Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
        assert accepted["message"].startswith("spec.rewards[0].memory:")
        assert "write" in accepted["message"]
        assert emulation.opened == 0
        jobs.patch("job", {"spec": {"rewards": [{"name": "right", "math": {}}]}})
        status = jobs.wait_phase("job", "Succeeded")
        assert condition(status, "Accepted")["status"] == "True"
        assert condition(status, "Failed")["status"] == "False"


def test_a_folder_of_somebody_else_is_not_touched_unless_told_to(jobs: Jobs, tmp_path: Path) -> None:
    emulation = Emulation()
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job(steps=1))
        jobs.wait_phase("job", "Succeeded")
        jobs.delete("job")
        jobs.wait_gone("job")
        jobs.apply(small_job(steps=2))
        status = jobs.wait_phase("job", "Failed")
        assert condition(status, "Failed")["reason"] == "FolderTaken"
        assert "rlhfless.io/adopt" in status["message"]
        jobs.patch("job", {"metadata": {"annotations": {"rlhfless.io/adopt": "true"}}})
        status = jobs.wait_phase("job", "Succeeded")
        assert status["step"] == 2
    steps = [request.key.step for request in emulation.requests if request.task == "learn" and request.save_checkpoint]
    assert steps == [1, 2]


def test_a_change_in_mid_run_is_taken_up(jobs: Jobs, tmp_path: Path) -> None:
    held = Held("learn")
    emulation = Emulation(holding=held)
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job(steps=1))
        wait_for(held.reached.is_set)
        held.open.set()
        jobs.patch("job", {"spec": {"steps": 4}})
        status = jobs.wait("job", lambda status: status.get("progress") == "4/4" and status["phase"] == "Succeeded")
        assert status["observedGeneration"] == 2


def test_an_operator_that_stops_says_so_and_the_next_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    held = Held("learn")
    emulation = Emulation(holding=held)
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job())
        wait_for(held.reached.is_set)
    status = jobs.status("job")
    assert (status["phase"], status["reason"]) == ("Interrupted", "OperatorStopped")
    held.open.set()
    with running_operator(tmp_path, emulation):
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded"
    assert [step["step"] for step in status["recentSteps"]] == [1, 2, 3]


def test_a_job_that_another_driver_has_waits_for_its_lease(jobs: Jobs, tmp_path: Path) -> None:
    lease = Lease.acquire(str(tmp_path / "runs" / "job"))
    with running_operator(tmp_path):
        jobs.apply(small_job())
        status = jobs.wait("job", lambda status: status.get("reason") == "WaitingForLease")
        assert status["phase"] == "Pending"
        assert condition(status, "Progressing")["status"] == "False"
        lease.release()
        jobs.wait_phase("job", "Succeeded")


def test_services_that_cannot_be_had_are_tried_again(jobs: Jobs, tmp_path: Path) -> None:
    emulation = Emulation(unavailable="Knative's feature nodeselector is off; turn it on")
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job(backoffLimit=0))
        status = jobs.wait("job", lambda status: condition(status, "ServicesReady").get("status") == "False")
        assert condition(status, "ServicesReady")["message"] == "Knative's feature nodeselector is off; turn it on"
        emulation.unavailable = ""
        status = jobs.wait_phase("job", "Succeeded", "Failed")
        assert status["phase"] == "Succeeded"
        assert condition(status, "ServicesReady")["status"] == "True"


def test_a_status_is_written_a_few_times_a_step(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path, Emulation(task_seconds=0.2)) as operator:
        jobs.apply(small_job(steps=5))
        jobs.wait_phase("job", "Succeeded")
        exposition = operator.get(operator.operator.metrics_port, "/metrics")
    writes = float(re.search(r"^rlhfless_operator_status_writes_total (\S+)", exposition, re.MULTILINE)[1])
    assert writes <= 3 * 5 + 5


def recorded_steps(artifacts: Path) -> list[int]:
    lines = (artifacts / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


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


def test_two_operators_without_an_election_do_not_spoil_a_job(jobs: Jobs, tmp_path: Path) -> None:
    with operator_process(tmp_path, 0.05, jobs.namespace) as first, operator_process(tmp_path, 0.05, jobs.namespace):
        jobs.apply(small_job(steps=12))
        jobs.wait("job", lambda status: status.get("step", 0) >= 3)
        first.kill()
        first.wait()
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded"
    assert recorded_steps(tmp_path) == list(range(1, 13))


def test_alive_and_measured(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path, namespaces=(jobs.namespace,)) as operator:
        jobs.apply(small_job())
        jobs.wait_phase("job", "Succeeded")
        assert json.loads(operator.get(operator.operator.liveness_port, "/healthz")) == {"stuck": []}
        numbers = dict(
            line.rsplit(" ", 1)
            for line in operator.get(operator.operator.metrics_port, "/metrics").splitlines()
            if not line.startswith("#")
        )
        labels = f'job="job",namespace="{jobs.namespace}"'
        assert float(numbers[f"rlhfless_steps_total{{{labels}}}"]) == 3
        assert float(numbers[f'rlhfless_job_phase{{{labels},phase="Succeeded"}}']) == 1
        assert float(numbers["rlhfless_operator_jobs"]) == 1
        cost = sum(float(value) for name, value in numbers.items() if name.startswith(f"rlhfless_cost_total{{{labels}"))
        assert cost >= float(jobs.status("job")["cost"]), "what is spent after the last step is counted too"
        jobs.delete("job")
        jobs.wait_gone("job")
        exposition = wait_for(
            lambda: (
                "rlhfless_operator_jobs 0.0" in (text := operator.get(operator.operator.metrics_port, "/metrics"))
                and text
            )
        )
        assert labels not in exposition


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


def test_adopted_work_of_another_document_is_not_spoilt(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path):
        jobs.apply(small_job(steps=1))
        jobs.wait_phase("job", "Succeeded")
        jobs.delete("job")
        jobs.wait_gone("job")
        other = small_job(steps=2, seed=1)
        other["metadata"]["annotations"] = {"rlhfless.io/adopt": "true"}
        jobs.apply(other)
        status = jobs.wait_phase("job", "Failed")
        assert condition(status, "Accepted")["reason"] == "SpecChanged"
        assert "spec.seed can't be changed once a step is done" in status["message"]
        jobs.patch("job", {"spec": {"seed": 0}})
        assert jobs.wait_phase("job", "Succeeded")["step"] == 2


def test_a_driver_whose_job_another_operator_has_taken_stops(jobs: Jobs, tmp_path: Path) -> None:
    held = Held("learn")
    emulation = Emulation(holding=held)
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job())
        wait_for(held.reached.is_set)
        jobs.wait("job", lambda status: status.get("stage") == "learning")
        code, answer = jobs.patch("job", {"status": {"driver": {"operator": "another", "lease": 9}}}, "/status")
        assert code == 200, answer
        wait_for(lambda: emulation.closed == 1)
        held.open.set()
        # Once it is seen that nobody else holds the folder, the job is taken up again.
        status = jobs.wait_phase("job", "Succeeded")
    assert emulation.closed == 2
    assert status["driver"]["lease"] == 2
    assert recorded_steps(tmp_path) == [1, 2, 3]
