"""The record of a finished step, and the job's status after it: pure functions of the step's outcome."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from rlhfless_functions.api import LearnResult, Stage
from rlhfless_operator.job.charged import Charged
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.records.record import StageAccount, StepRecord
from rlhfless_operator.records.status import RECENT_STEPS, CheckpointStatus, RLHFJobStatus, StepStatus
from rlhfless_operator.training.journal.ledger import Account


def record_of(
    step: int,
    seconds: float,
    account: Account,
    batch: StepBatch | None,
    learned: LearnResult | None,
    evaluation: dict[str, float] | None,
    *,
    prices: Mapping[Charged, Decimal],
    finished_at: float,
) -> StepRecord:
    """Return the record of a step for `metrics.jsonl`.

    Args:
        step: its number; 0 is the evaluation before the first.
        seconds: its duration.
        account: instance-seconds of the step, those of drivers that stopped in it included.
        batch: the rollout's record; None for step 0.
        learned: the learner's result; None for step 0.
        evaluation: results after it, if it was evaluated.
        prices: of an hour of an instance of each stage.
        finished_at: Unix time.
    """
    stages = dict(batch.seconds) if batch else {}
    if learned:
        waited = learned.metrics.get("seconds/wait", 0.0)
        beyond = learned.metrics.get("learning/beyond_preparation")
        stages["learning"] = learned.metrics.get("seconds", 0.0) - waited if beyond is None else beyond
        if beyond is None and waited:
            stages["generation"] = stages.get("generation", 0.0) + waited
    stages["overhead"] = max(0.0, seconds - sum(stages.values()))
    metrics = {**(batch.metrics if batch else {}), **(learned.metrics if learned else {})}
    bound = metrics.get("planning/lower_bound_instance_seconds")
    # The account includes an evaluation's generation. With `async` the generation in it is that of later steps.
    alone = evaluation is None and "generation/staleness" not in metrics
    if bound is not None and alone and (held := account.total("generation")):
        metrics["planning/lower_bound_share"] = bound / held
    return StepRecord(
        step=step,
        seconds=seconds,
        stages=stages,
        metrics=metrics,
        ledger={**account.by_stage(prices)},
        plan=batch.plan.model_dump() if batch else None,
        evaluation=evaluation,
        finished_at=finished_at,
    )


def spent_after(
    before: RLHFJobStatus, account: Account, *, prices: Mapping[Charged, Decimal], gpus: Mapping[Stage, int]
) -> dict[str, Any]:
    """Return the status fields on spending, once an account is added.

    Args:
        account: of the instances since then.
        prices: of an hour of an instance of each stage.
        gpus: of an instance of each stage.
    """
    return {
        "instance_seconds": before.instance_seconds + account.total(),
        "gpu_seconds": before.gpu_seconds + account.gpu_seconds(gpus),
        "idle_seconds": before.idle_seconds + account.total(state="idle"),
        "cost": before.cost + account.cost(prices),
    }


def status_after(
    before: RLHFJobStatus,
    record: StepRecord,
    account: Account,
    learned: LearnResult | None,
    *,
    prices: Mapping[Charged, Decimal],
    gpus: Mapping[Stage, int],
    keep_best: bool,
) -> RLHFJobStatus:
    """Return the status with which a step is done.

    Args:
        record: of the step, or of step 0's evaluation.
        account: of the step's instances since the status before.
        learned: the learner's result; None for step 0.
        prices: of an hour of an instance of each stage.
        gpus: of an instance of each stage.
        keep_best: whether the weights of the best evaluation are kept.
    """
    cost = account.cost(prices) + Account.of(before.unfinished).cost(prices)
    changes: dict[str, Any] = {
        "step": record.step,
        "seconds": before.seconds + record.seconds,
        **spent_after(before, account, prices=prices, gpus=gpus),
        "unfinished": {},
    }
    if learned is not None and record.plan is not None:
        reward, actors = record.metrics.get("reward"), record.plan["actors"]
        brief = StepStatus(step=record.step, reward=reward, seconds=record.seconds, actors=actors, cost=cost)
        changes |= {
            "weights": learned.weights,
            "critic": learned.critic,
            "reward": reward,
            "actors": actors,
            "holding": record.plan["holds_reason"] if record.plan.get("holds") else "",
            "recent_steps": [*before.recent_steps, brief][-RECENT_STEPS:],
        }
        if learned.checkpoint is not None:
            changes["checkpoint"] = CheckpointStatus(step=record.step, uri=learned.checkpoint)
    best = before.best_evaluation
    if keep_best and record.evaluation is not None and (best is None or record.evaluation["reward"] > best):
        changes |= {
            "best": learned.weights if learned else None,
            "best_evaluation": record.evaluation["reward"],
        }
    return before.model_copy(update=changes)


def record_with(record: StepRecord, account: Account, *, prices: Mapping[Charged, Decimal]) -> StepRecord:
    """Add an account to a step's record.

    Args:
        account: of the instances since the step.
        prices: of an hour of an instance of each stage.
    """
    since = account.by_stage(prices)
    added = {stage: _sum(record.ledger.get(stage, StageAccount()), more) for stage, more in since.items()}
    return record.model_copy(update={"ledger": {**record.ledger, **added}})


def _sum(first: StageAccount, second: StageAccount) -> StageAccount:
    return StageAccount(**{name: getattr(first, name) + getattr(second, name) for name in StageAccount.model_fields})
