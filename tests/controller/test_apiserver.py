"""The operator against an API server: what a user of `kubectl` sees. The functions are emulated."""

import json
import re
import threading
from pathlib import Path

import pytest

from rlhfless_functions.api import Failed, RunRequest
from rlhfless_operator.platforms.base import TaskFailedError
from tests.clusters.emulated_functions import Emulation, Held
from tests.controller.api_server_jobs import job_held_in
from tests.controller.api_server_jobs import jobs as jobs  # The fixtures.
from tests.controller.api_server_jobs import server as server
from tests.controller.operator_harness import Jobs, condition, running_operator, wait_for
from tests.jobs import small_job


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
    assert (tmp_path / jobs.namespace / "runs" / "job" / "model" / "README.md").exists()
    assert (emulation.opened, emulation.closed, emulation.removed) == (1, 1, 1)


STAGES = ("materialize", "generate", "prepare", "learn", "export")


@pytest.mark.parametrize("task", STAGES)
def test_a_job_that_is_deleted_in_any_stage_is_gone_at_once(jobs: Jobs, tmp_path: Path, task: str) -> None:
    with job_held_in(task, jobs, tmp_path) as (_, emulation):
        job = jobs.get("job")
        assert job is not None
        assert job["metadata"]["finalizers"] == ["rlhfless.io/driver"]
        jobs.delete("job")
        jobs.wait_gone("job")
        assert emulation.closed == 1
    leases = tmp_path / jobs.namespace / "runs" / "job" / "leases"
    lease = json.loads(max(leases.glob("*-renewed.json")).read_text())
    assert lease["released"]


def test_suspend_lets_go_of_everything_and_resume_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    with job_held_in("learn", jobs, tmp_path) as (held, emulation):
        jobs.patch("job", {"spec": {"suspend": True}})
        status = jobs.wait_phase("job", "Suspended")
        assert (emulation.closed, emulation.removed) == (1, 1)
        assert condition(status, "Suspended")["status"] == "True"
        assert condition(status, "Progressing")["reason"] == "Suspended"
        assert status["observedGeneration"] == 2
        wait_for(lambda: "finalizers" not in (jobs.get("job") or {})["metadata"], lambda: str(jobs.get("job")))
        held.over = True
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


def test_a_finished_job_that_is_changed_says_that_nothing_was_trained_with_it(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path):
        jobs.apply(small_job(steps=1))
        jobs.wait_phase("job", "Succeeded")
        jobs.patch("job", {"spec": {"optimizer": {"learningRate": 0.5}}})
        status = jobs.wait("job", lambda status: "since then" in status.get("message", ""))
        assert status["phase"] == "Succeeded"
        changed = "since then spec.optimizer.learningRate was 1e-06 and is 0.5, which has no effect on a finished job"
        assert changed in status["message"]


def test_a_finished_job_is_deleted_after_its_time(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path):
        jobs.apply(small_job(steps=1, ttlAfterFinished="0s"))
        jobs.wait_gone("job")
    assert (tmp_path / jobs.namespace / "runs" / "job" / "model" / "README.md").exists(), "the work stays"


def test_steps_that_teach_nothing_are_a_condition_until_one_teaches_again(jobs: Jobs, tmp_path: Path) -> None:
    held = Held(lambda request: request.task == "learn" and request.key.step in (4, 5) and request.key.step not in let)
    let: set[int] = set()
    emulation = Emulation(learnt=lambda step: {"batch/teaching_groups": float(step == 5)}, holding=held)
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job(steps=5))
        status = jobs.wait("job", lambda status: condition(status, "StepsTeach").get("status") == "False")
        assert condition(status, "StepsTeach")["reason"] == "NothingToLearn"
        assert "nothing to learn from: all samples of each group" in condition(status, "StepsTeach")["message"]
    with running_operator(tmp_path, emulation):
        let.add(4)
        jobs.wait("job", lambda status: "steps 1 to 4 had" in condition(status, "StepsTeach")["message"])
        let.add(5)
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert (status["phase"], condition(status, "StepsTeach")["status"]) == ("Succeeded", "True")
    assert condition(status, "StepsTeach")["reason"] == "SomethingToLearn"


def test_a_job_that_takes_too_long_fails_and_goes_on_when_it_may(jobs: Jobs, tmp_path: Path) -> None:
    held = Held.task("learn")
    with running_operator(tmp_path, Emulation(holding=held)):
        jobs.apply(small_job(activeDeadline="500ms"))
        status = jobs.wait_phase("job", "Failed")
        assert condition(status, "Failed")["reason"] == "DeadlineExceeded"
        assert "raise it to go on" in status["message"]
        held.over = True
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
    with job_held_in("learn", jobs, tmp_path, steps=1) as (held, _):
        held.over = True
        jobs.patch("job", {"spec": {"steps": 4}})
        status = jobs.wait("job", lambda status: status.get("progress") == "4/4" and status["phase"] == "Succeeded")
        assert status["observedGeneration"] == 2


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


def test_alive_and_measured(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path, namespaces=(jobs.namespace,)) as operator:
        jobs.apply(small_job())
        jobs.wait_phase("job", "Succeeded")
        assert json.loads(operator.get(operator.operator.liveness_port, "/healthz")) == {"silent": []}
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
        assert cost == pytest.approx(float(jobs.status("job")["cost"]), rel=0.01), "both end with the last instance"
        jobs.delete("job")
        jobs.wait_gone("job")
        exposition = wait_for(
            lambda: (
                "rlhfless_operator_jobs 0.0" in (text := operator.get(operator.operator.metrics_port, "/metrics"))
                and text
            )
        )
        assert labels not in exposition


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
