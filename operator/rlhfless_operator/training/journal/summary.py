"""The summary of a job, for scripts and for the model card."""

from typing import Any

from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.barren_steps import taught_nothing
from rlhfless_operator.records.record import StepRecord, busy_shares
from rlhfless_operator.records.status import DataStatus, RLHFJobStatus


def summarize(job: RLHFJob, status: RLHFJobStatus, records: list[StepRecord]) -> dict[str, Any]:
    """Return `summary.json`: seconds, money and its share of the budget, rewards, and held-out rewards if the
    job evaluates."""
    rewards = [record.metrics["reward"] for record in records if "reward" in record.metrics]
    evaluations = [record.held_out_reward for record in records if record.held_out_reward is not None]
    gpus = {"environment": 0, **{str(stage): count for stage, count in job.spec.instance_gpus.items()}}
    summary: dict[str, Any] = {
        "name": job.metadata.name,
        "uid": status.uid,
        "phase": status.phase,
        "algorithm": job.spec.algorithm.name,
        "model": job.spec.model.source,
        "seed": job.spec.seed,
        "steps": status.step,
        "seconds": round(status.seconds, 3),
        "gpu_seconds": round(status.gpu_seconds, 3),
        "instance_seconds": round(status.instance_seconds, 3),
        "idle_seconds": round(status.idle_seconds, 3),
        "busy_share": {
            stage: round(share, 4) for stage, share in busy_shares([record.ledger for record in records], gpus).items()
        },
        "cost": str(status.cost),
        "forecast_cost": None if status.forecast is None else str(status.forecast),
        "budget_used": None if status.budget_used is None else round(status.budget_used, 6),
        "currency": job.spec.prices.currency,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "steps_that_taught_nothing": sum(map(taught_nothing, records)),
        "held_steps": sum(bool(record.plan and record.plan.get("holds")) for record in records),
        "holding": status.holding,
    }
    if evaluations:
        summary |= {"held_out_reward_before": evaluations[0], "held_out_reward_after": evaluations[-1]}
    datasets = {"training": status.data, "evaluation": status.evaluation_data}
    if known := {purpose: _counts(data) for purpose, data in datasets.items() if data is not None}:
        summary["data"] = known
    return summary


def _counts(data: DataStatus) -> dict[str, Any]:
    return {
        "rows": data.rows,
        "prompts": data.prompts,
        "left_out": data.left_out,
        "without_ground_truth": data.without_ground_truth,
    }
