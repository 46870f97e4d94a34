"""A job's budget on a cluster: it is suspended before it passes it, says so, and goes on once it is raised."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.journal.step_journal import read_status
from tests.clusters.emulated_functions import Emulation, Held
from tests.controller.api_server_jobs import jobs as jobs  # The fixtures.
from tests.controller.api_server_jobs import recorded_steps
from tests.controller.api_server_jobs import server as server
from tests.controller.operator_harness import Jobs, condition, running_operator, wait_for
from tests.jobs import small_job
from tests.training.steady_ledger import steady_costs as steady_costs  # A fixture.

SECONDS = 0.1
"""Of each task. Three instances are held all the time, and an instance-second costs 1."""


def job_with(budget: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    return small_job(steps=steps, **({"budget": budget} if budget is not None else {}))


def generated(emulation: Emulation) -> list[int]:
    """Steps that were generated, as often as they were."""
    return [request.key.step for request in emulation.requests if request.task == "generate"]


@pytest.mark.slow
@pytest.mark.usefixtures("steady_costs")
def test_half_of_the_forecast_suspends_the_job_before_it_is_passed_and_raised_it_goes_on(
    jobs: Jobs, tmp_path: Path
) -> None:
    with running_operator(tmp_path / "whole", Emulation(task_seconds=SECONDS)):
        jobs.apply(job_with(None, 8))
        forecast = Decimal(jobs.wait_phase("job", "Succeeded", "Failed")["forecast"])
        jobs.delete("job")
        jobs.wait_gone("job")

    emulation, half = Emulation(task_seconds=SECONDS), (forecast / 2).quantize(Decimal("0.01"))
    with running_operator(tmp_path, emulation) as operator:
        jobs.apply(job_with({"money": str(half)}, 8))
        status = jobs.wait_phase("job", "Suspended", "Succeeded", "Failed")
        assert status["phase"] == "Suspended", status
        assert 1 <= status["step"] < 8
        assert Decimal(status["cost"]) <= half
        assert Decimal(status["forecast"]) > half
        assert status["budget"] == f"{Decimal(status['cost']) / half:.0%}"
        assert status["reason"] == "BudgetExhausted"
        told = condition(status, "Suspended")
        assert (told["status"], told["reason"]) == ("True", "BudgetExhausted")
        assert f"of {half} USD (spec.budget.money) are spent" in told["message"]
        assert "raise spec.budget.money to go on" in told["message"]
        assert condition(status, "Progressing")["status"] == "False"
        assert ("BudgetExhausted", "job") in jobs.events()
        assert (emulation.closed, emulation.removed) == (1, 1)
        wait_for(lambda: "finalizers" not in (jobs.get("job") or {})["metadata"], lambda: str(jobs.get("job")))
        stopped_after = status["step"]
        exposition = operator.get(operator.operator.metrics_port, "/metrics")
        assert f'rlhfless_budget_used_ratio{{job="job",namespace="{jobs.namespace}"}} 1.0' in exposition

        jobs.patch("job", {"spec": {"budget": {"money": str(10 * forecast)}}})
        status = jobs.wait_phase("job", "Succeeded", "Failed")
        assert status["phase"] == "Succeeded", status
        assert condition(status, "Suspended")["status"] == "False"
    assert generated(emulation) == list(range(1, 9)), "nothing is done twice"
    assert recorded_steps(tmp_path) == list(range(1, 9))
    assert stopped_after < 8


EIGHT_GPUS = PodsSpec(resources=ResourcesSpec(limits={"nvidia.com/gpu": "8"}))
"""Default pods, as a chart gives them."""


def test_the_gpus_of_a_charts_default_pods_are_counted(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path, Emulation(task_seconds=SECONDS), pods=EIGHT_GPUS):
        jobs.apply(small_job(steps=1))
        jobs.wait_phase("job", "Succeeded", "Failed")
    status = read_status(JobFolder(str(tmp_path / jobs.namespace / "runs" / "job")))
    assert status is not None
    assert status.gpu_seconds == pytest.approx(8 * status.instance_seconds)


def test_default_pods_without_a_price_are_told(jobs: Jobs, tmp_path: Path) -> None:
    pods = {"resources": {"limits": {"nvidia.com/gpu": 1}}, "nodeSelector": {"gpu": "H100"}}
    prices = {"accelerators": {"H100": "4.00", "L40S": "1.50"}}
    with running_operator(tmp_path, Emulation(), pods=EIGHT_GPUS):
        jobs.apply(small_job(generation={"pods": pods}, prices=prices))
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert (status["phase"], status["reason"]) == ("Failed", "InvalidSpec")
    assert "spec.prices.accelerators: nothing says which of H100, L40S preparation runs on" in status["message"]


def test_too_small_a_raise_is_told_and_starts_nothing(jobs: Jobs, tmp_path: Path) -> None:
    emulation = Emulation(task_seconds=SECONDS)
    with running_operator(tmp_path, emulation):
        jobs.apply(job_with({"gpuHours": 0.000001}, 3))
        jobs.wait_phase("job", "Suspended")
        done = len(emulation.requests)
        jobs.patch("job", {"spec": {"budget": {"gpuHours": 0.000002}}})
        status = jobs.wait(
            "job", lambda status: status.get("observedGeneration") == 2 and status["phase"] == "Suspended"
        )
        assert "2e-06 GPU-hours (spec.budget.gpuHours)" in status["message"]
        assert (len(emulation.requests), emulation.opened) == (done, 1)


def test_a_budget_that_changes_while_the_job_runs_does_not_disturb_its_driver(jobs: Jobs, tmp_path: Path) -> None:
    held = Held.task("learn")
    emulation = Emulation(holding=held)
    with running_operator(tmp_path, emulation):
        jobs.apply(job_with({"gpuHours": 1000}, 3))
        wait_for(lambda: held.reached)
        jobs.patch("job", {"spec": {"budget": {"gpuHours": 0.000001}}})
        jobs.wait("job", lambda status: status.get("observedGeneration") == 2)
        held.over = True
        status = jobs.wait_phase("job", "Suspended", "Succeeded", "Failed")
        assert (status["phase"], status["step"]) == ("Suspended", 1)
        assert generated(emulation) == [1]
        jobs.patch("job", {"spec": {"budget": None}})
        assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"
    assert generated(emulation) == [1, 2, 3]


def test_an_operator_that_starts_anew_leaves_a_job_without_a_budget_alone(jobs: Jobs, tmp_path: Path) -> None:
    with running_operator(tmp_path, Emulation(task_seconds=SECONDS)):
        jobs.apply(job_with({"gpuHours": 0.000001}, 3))
        jobs.wait_phase("job", "Suspended")
    emulation = Emulation(task_seconds=SECONDS)
    with running_operator(tmp_path, emulation):
        jobs.apply(small_job("other"))
        jobs.wait_phase("other", "Succeeded")
        assert jobs.status("job")["phase"] == "Suspended"
        assert not emulation.tasks(str(tmp_path / jobs.namespace / "runs" / "job"))
