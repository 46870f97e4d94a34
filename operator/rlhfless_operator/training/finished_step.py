"""A job's status after one more step: a pure function of the one before and of what the step came to."""

from decimal import Decimal
from typing import Any

from rlhfless_functions.api import LearnResult
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.records.status import (
    RECENT_STEPS,
    CheckpointStatus,
    RLHFJobStatus,
    StepStatus,
)
from rlhfless_operator.training.ledger import Account


def status_after(
    before: RLHFJobStatus,
    record: StepRecord,
    account: Account,
    learned: LearnResult | None,
    *,
    instance_hour: Decimal,
    keep_best: bool,
) -> RLHFJobStatus:
    """The status with which a step is done.

    Args:
        record: of the step, or of step 0's evaluation.
        account: what its instances did.
        learned: what the learner made; None for step 0.
        instance_hour: price of an hour of an instance.
        keep_best: whether the weights of the best evaluation are kept.
    """
    cost = account.cost(instance_hour)
    changes: dict[str, Any] = {
        "step": record.step,
        "seconds": before.seconds + record.seconds,
        "instance_seconds": before.instance_seconds + account.total(),
        "idle_seconds": before.idle_seconds + account.total(state="idle"),
        "cost": before.cost + cost,
    }
    if learned is not None and record.plan is not None:
        reward, actors = record.metrics.get("reward"), record.plan["actors"]
        brief = StepStatus(step=record.step, reward=reward, seconds=record.seconds, actors=actors, cost=cost)
        changes |= {
            "weights": learned.weights,
            "critic": learned.critic,
            "reward": reward,
            "actors": actors,
            "recent_steps": [*before.recent_steps, brief][-RECENT_STEPS:],
        }
        if learned.checkpoint is not None:
            changes["checkpoint"] = CheckpointStatus(step=record.step, uri=learned.checkpoint)
    best = before.best_evaluation
    if keep_best and record.evaluation is not None and (best is None or record.evaluation["accuracy"] > best):
        changes |= {
            "best": learned.weights if learned else None,
            "best_evaluation": record.evaluation["accuracy"],
        }
    return before.model_copy(update=changes)
