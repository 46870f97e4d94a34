"""Whole jobs with a budget: they stop before they pass it, and go on to the bits of one that never stopped."""

import json
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.training.journal.budget import BudgetExhaustedError
from tests.command_line import run_command
from tests.training.steady_ledger import STEP_SECONDS
from tests.training.steady_ledger import steady_costs as steady_costs  # A fixture.
from tests.training.steady_ledger import steady_learning as steady_learning
from tests.training.whole_jobs import MakeJob, assert_same_final_weights, folder_of, records_of, run_job, status_of

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

STEPS = 8


def with_budget(file: Path, **budget: object) -> Path:
    """The job with another budget, in the same file."""
    document = yaml.safe_load(file.read_text())
    document["spec"]["budget"] = budget
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.mark.nightly
@pytest.mark.usefixtures("steady_costs")
def test_a_budget_of_half_the_forecast_stops_the_job_before_it_is_passed_and_raised_it_ends_the_same(
    tiny_job: MakeJob,
) -> None:
    whole = tiny_job("whole", steps=STEPS)
    forecast = Decimal(run_job(whole)["cost"])
    half = str((forecast / 2).quantize(Decimal("0.000001")))

    file = with_budget(tiny_job("half", steps=STEPS), money=half)
    with pytest.raises(BudgetExhaustedError, match=r"\(spec.budget.money\) are spent"):
        run_job(file)
    status = status_of(file)
    assert status["phase"] == "Suspended"
    assert "raise spec.budget.money to go on" in status["message"]
    assert 1 <= status["step"] < STEPS
    assert Decimal(status["cost"]) <= Decimal(half)
    assert status["budgetUsed"] == pytest.approx(float(Decimal(status["cost"]) / Decimal(half)))
    assert Decimal(status["forecast"]) > Decimal(half)
    summary = json.loads((folder_of(file) / "summary.json").read_text())
    assert (summary["phase"], summary["steps"]) == ("Suspended", status["step"])
    assert Decimal(summary["forecast_cost"]) == Decimal(status["forecast"])
    assert 0 < summary["budget_used"] <= 1
    assert (folder_of(file) / "report.html").exists()

    run_job(with_budget(file, money=str(10 * forecast)))
    assert [record["step"] for record in records_of(file)] == list(range(1, STEPS + 1))
    assert_same_final_weights(file, whole)


@pytest.mark.slow
@pytest.mark.usefixtures("steady_learning")
def test_steps_that_are_generated_ahead_are_paid_for_before_another_one_begins(tiny_job: MakeJob) -> None:
    """There is money for four steps and a half. Two of them may be under way when the fifth is to begin. It is refused
    then, and again once they are done."""
    ahead = tiny_job("ahead", steps=STEPS, prices={"instanceHour": "3600"}, **{"async": {"maxStaleness": 2}})
    file = with_budget(ahead, money=str(4.5 * STEP_SECONDS))
    with pytest.raises(BudgetExhaustedError, match="step 5 is not begun: "):
        run_job(file)
    status = status_of(file)
    assert (status["phase"], status["step"]) == ("Suspended", 4)
    assert Decimal(status["cost"]) <= Decimal("4.5") * int(STEP_SECONDS)


@pytest.mark.slow
def test_a_budget_that_reading_the_data_uses_up_is_kept_to_until_it_is_raised(tiny_job: MakeJob) -> None:
    """What is spent before the first step counts, too; each command after that says so and starts nothing."""
    file = with_budget(tiny_job("job", steps=2), gpuHours=1e-9)
    with pytest.raises(
        BudgetExhaustedError, match=r"step 1 is not begun: .* \(spec.budget.gpuHours\) are spent; raise"
    ):
        run_job(file)
    assert status_of(file)["gpuSeconds"] > 0
    logs = (folder_of(file) / "logs" / "instances.jsonl").read_text()

    ended = subprocess.run(run_command(file), capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 3, ended.stderr
    assert "step 1 is not begun" in ended.stderr
    assert "run the same command to resume" in ended.stderr
    assert (folder_of(file) / "logs" / "instances.jsonl").read_text() == logs
    assert status_of(file)["step"] == 0

    raised = run_command(file, "--set", "spec.budget.gpuHours=10")
    ended = subprocess.run(raised, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert status_of(file)["phase"] == "Succeeded"
    assert load_job(file).spec.budget == BudgetSpec(gpu_hours=1e-9)

    ended = subprocess.run(run_command(file), capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, "another budget does not make it another job"
    assert "has finished all of its 2 steps" in ended.stdout


def test_each_stage_of_a_job_is_charged_at_its_own_price(tiny_job: MakeJob) -> None:
    prices = {
        "stages": {"preparation": "1.00"},
        "accelerators": {"A100": "5.00", "H100": "10.00"},
        "spot": {"H100": "4.00"},
    }
    h100 = {"nvidia.com/gpu.product": "H100"}
    spot = {**h100, "karpenter.sh/capacity-type": "spot"}
    file = tiny_job(
        steps=1,
        prices=prices,
        pods={"resources": {"limits": {"nvidia.com/gpu": 2}}},
        generation={"pods": {"nodeSelector": spot}},
        learning={"pods": {"nodeSelector": h100}},
    )
    run_job(file)
    (record,) = records_of(file)
    hours = {"generation": Decimal("8.00"), "preparation": Decimal("1.00"), "learning": Decimal("20.00")}
    for stage, account in record["ledger"].items():
        seconds = sum(account[state] for state in ("starting", "busy", "idle", "switching", "draining"))
        assert seconds > 0
        assert float(account["cost"]) == pytest.approx(seconds * float(hours[stage]) / 3600, abs=2e-6)
    status = status_of(file)
    assert status["gpuSeconds"] == pytest.approx(2 * status["instanceSeconds"])
