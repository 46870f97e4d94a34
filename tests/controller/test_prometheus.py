"""The operator's metrics: names and labels that dashboards rely on, fed by real runs of emulated functions."""

import asyncio
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import Failed, RunRequest
from rlhfless_operator.controller.figures import planned_money, response_tokens, training_figures
from rlhfless_operator.controller.metering import Metering
from rlhfless_operator.controller.prometheus import OperatorMetrics
from rlhfless_operator.job.actor_range import actor_range
from rlhfless_operator.job.reading.validation import parse_content
from rlhfless_operator.platforms.base import StateChange, StateListener, TaskFailedError
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.records.record import StageAccount, StepRecord
from rlhfless_operator.training.driver import drive
from rlhfless_operator.training.run import AvailableGpus
from tests.clusters.emulated_functions import EmulatedPlatform, Emulation
from tests.jobs import small_job

NAMES = {
    "gpu_seconds_total": {"stage", "state"},
    "cost_total": {"stage"},
    "steps_total": set(),
    "job_steps": set(),
    "stage_duration_seconds": {"stage"},
    "cold_start_seconds": {"stage"},
    "generation_actors": {"kind"},
    "instances_asleep": {"stage"},
    "steps_under_way": {"stage"},
    "cost_forecast_total": set(),
    "budget_used_ratio": set(),
    "cost_plan_total": {"kind"},
    "reassignments_total": {"reason"},
    "weights_read_bytes_total": {"distance"},
    "reward": set(),
    "response_tokens": {"statistic"},
    "training": {"metric"},
    "job_phase": {"phase"},
    "job_last_progress_timestamp_seconds": set(),
}
"""Metrics of a job after `rlhfless_`, and their labels besides namespace and job."""

Sample = tuple[str, dict[str, str], float]


def samples(metrics: OperatorMetrics) -> Iterator[Sample]:
    for line in metrics.exposition().decode().splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            yield name.removeprefix("rlhfless_"), dict(re.findall(r'(\w+)="([^"]*)"', labels or "")), float(value)


def of(metrics: OperatorMetrics, name: str, **labels: str) -> float:
    (value,) = (
        value for found, having, value in samples(metrics) if found == name and labels.items() <= having.items()
    )
    return value


async def train(metrics: OperatorMetrics, root: Path, emulation: Emulation, **spec: Any) -> dict[str, Any]:
    """A whole job, metered as the operator meters it."""
    job = parse_content(small_job(**spec), "job")
    meter = metrics.job("ns", "job")
    ready: list[None] = []

    def make_platform(on_state: StateListener) -> JobPlatform:
        def both(change: StateChange) -> None:
            on_state(change)
            meter.observe(change)

        metering = Metering(meter, lambda: ready.append(None))
        return JobPlatform(EmulatedPlatform(emulation, both), PoolMember("uid", "ns", "job", {}), metering)

    try:
        return await drive(
            *(job, JobFolder(str(root)), make_platform, LiveProgress(), AvailableGpus(actor_range(job.spec))),
            on_open=meter.attach,
        )
    finally:
        meter.detach()
        assert len(ready) <= 1, "it is opened once"


async def test_the_gpu_seconds_of_the_operator_and_of_the_summary_are_of_gpus(tmp_path: Path) -> None:
    metrics = OperatorMetrics()
    pods = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    summary = await train(metrics, tmp_path, Emulation(task_seconds=0.01), learning={"pods": pods})
    seconds = {
        stage: sum(
            value
            for name, having, value in samples(metrics)
            if name == "gpu_seconds_total" and having["stage"] == stage
        )
        for stage in ("generation", "preparation", "learning")
    }
    assert seconds["generation"] == 0, "only the learner's pods have GPUs"
    assert sum(seconds.values()) == pytest.approx(summary["gpu_seconds"], abs=0.8)
    assert 0 < summary["gpu_seconds"] <= 8 * summary["instance_seconds"]


async def test_every_metric_is_there_under_its_name(tmp_path: Path) -> None:
    metrics = OperatorMetrics()
    metrics.show_phase("ns", "job", "Running")
    await train(metrics, tmp_path, Emulation(task_seconds=0.01), budget={"gpuHours": 10})
    found: dict[str, set[str]] = {}
    for name, labels, _ in samples(metrics):
        if labels.get("job") == "job":
            stem = re.sub(r"_(bucket|sum|count)$", "", name)
            found.setdefault(stem, set()).update(labels.keys() - {"namespace", "job", "le"})
            assert labels["namespace"] == "ns"
    found = {name: labels for name, labels in found.items() if not name.endswith("_created")}
    assert found == NAMES


async def test_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    metrics = OperatorMetrics()
    summary = await train(metrics, tmp_path, Emulation(task_seconds=0.02))
    assert of(metrics, "steps_total") == 3
    assert of(metrics, "job_steps") == 3
    assert of(metrics, "reward") == pytest.approx(0.75)
    assert of(metrics, "training", metric="entropy") == 1.0
    assert of(metrics, "response_tokens", statistic="mean") == 8.5
    assert of(metrics, "response_tokens", statistic="max") == 9
    assert of(metrics, "stage_duration_seconds_count", stage="learning") == 3
    assert of(metrics, "reassignments_total", reason="lost") == 0
    assert of(metrics, "generation_actors", kind="wanted") == 0
    seconds = sum(value for name, _, value in samples(metrics) if name == "gpu_seconds_total")
    assert seconds == pytest.approx(summary["gpu_seconds"], abs=0.1), "both end with the last instance"
    cost = sum(value for name, _, value in samples(metrics) if name == "cost_total")
    assert cost == pytest.approx(seconds, rel=1e-3), "an instance-second costs 1 here"
    assert of(metrics, "cost_forecast_total") == pytest.approx(float(summary["cost"]))
    assert of(metrics, "cost_plan_total", kind="chosen") >= of(metrics, "cost_plan_total", kind="bound") > 0
    assert sum(value for name, _, value in samples(metrics) if name == "control_seconds_count") > 0


async def test_an_asynchronous_job_is_in_several_stages_at_once(tmp_path: Path) -> None:
    metrics = OperatorMetrics()
    told: set[tuple[float, ...]] = set()

    def hold(request: RunRequest) -> bool:
        """The first step's learning and the second one's generation go on until both have been seen."""
        if request.task == "learn":
            names = ("generation", "learning")
            at_once = [of(metrics, "steps_under_way", stage=stage) for stage in names]
            told.add((*at_once, of(metrics, "generation_actors", kind="wanted")))
        return (1.0, 1.0, 1.0) not in told and (request.task, request.key.step) in (("learn", 1), ("generate", 2))

    emulation = Emulation(holding=hold, task_seconds=0.1)
    await asyncio.wait_for(train(metrics, tmp_path, emulation, steps=3, **{"async": {}}), 60)
    assert (1.0, 1.0, 1.0) in told
    assert of(metrics, "steps_under_way", stage="learning") == 0


async def test_counters_never_fall_when_a_driver_follows_another(tmp_path: Path) -> None:
    metrics = OperatorMetrics()
    failed = asyncio.Event()

    def fail_once(request: RunRequest) -> None:
        if request.task == "learn" and request.key.step == 2 and not failed.is_set():
            failed.set()
            raise TaskFailedError(Failed(reason="internal", message="no", retryable=False))

    emulation = Emulation(task_seconds=0.01, before=fail_once)
    with pytest.raises(Exception, match="no"):
        await train(metrics, tmp_path, emulation)
    between = {(name, *sorted(labels.items())): value for name, labels, value in samples(metrics)}
    assert of(metrics, "steps_total") == 1
    await train(metrics, tmp_path, emulation)
    assert of(metrics, "steps_total") == 3
    for name, labels, value in samples(metrics):
        if name.endswith("_total") and "forecast" not in name:
            assert value >= between.get((name, *sorted(labels.items())), 0.0), name


async def test_a_job_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    metrics = OperatorMetrics()
    metrics.show_phase("ns", "job", "Running")
    metrics.show_phase("ns", "other", "Failed")
    await train(metrics, tmp_path, Emulation())
    assert of(metrics, "operator_jobs") == 2
    metrics.forget("ns", "job")
    assert of(metrics, "operator_jobs") == 1
    assert not [name for name, labels, _ in samples(metrics) if labels.get("job") == "job"]
    assert of(metrics, "job_phase", phase="Failed", job="other") == 1


def test_requests_are_counted_and_writes_apart() -> None:
    metrics = OperatorMetrics()
    for verb in ("patch", "patch", "get"):
        metrics.requested(verb)
    assert of(metrics, "operator_status_writes_total") == 2
    assert of(metrics, "operator_api_requests_total", verb="get") == 1


def record(step: int, cost: str = "2", **more: Any) -> StepRecord:
    return StepRecord(step=step, ledger={"generation": StageAccount(cost=Decimal(cost))}, **more)


def test_plans_are_in_money() -> None:
    plan = {
        "expected_instance_seconds": 1800,
        "cheapest_instance_seconds": 900,
        "lower_bound_instance_seconds": 360,
    }
    assert planned_money(record(1, plan=plan), 2.0) == {"chosen": 1.0, "cheapest": 0.5, "bound": 0.2}
    assert planned_money(record(1), 2.0) == {}


def test_figures_of_a_step_are_the_learners_own() -> None:
    metrics = {"policy/clip_fraction_low": 0.1, "policy/clip_fraction_high": 0.2, "policy/kl": 0.5, "kl/reference": 0.7}
    metrics |= {"mismatch/mean_exp_abs": 1.01, "generation/tokens_per_pass": 1.5}
    figures = training_figures(record(1, metrics=metrics))
    assert figures == {"kl": 0.7, "clip_fraction": pytest.approx(0.3), "mismatch": 1.01, "tokens_per_pass": 1.5}


def test_response_tokens_have_a_percentile() -> None:
    assert response_tokens(range(1, 101)) == (50.5, 95.0, 100.0)
    assert response_tokens([7]) == (7.0, 7.0, 7.0)
