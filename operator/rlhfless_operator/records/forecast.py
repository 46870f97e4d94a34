"""Forecasts of a job's time and cost until its end, from its last steps."""

from collections.abc import Sequence
from decimal import Decimal

from rlhfless_operator.records.record import StepRecord

RECENT = 8
"""Number of last steps whose means the forecast uses."""


def recent_steps(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the training steps that a forecast uses."""
    return [record for record in records if record.step > 0][-RECENT:]


def forecast_cost(cost: Decimal, records: Sequence[StepRecord], total_steps: int) -> Decimal | None:
    """Forecast the money for the whole job, if the remaining steps cost as much as the last ones; None before the first
    is finished.

    Args:
        cost: cost so far.
        records: records of the finished steps.
        total_steps: steps of the whole job.
    """
    recent = recent_steps(records)
    if not recent:
        return None
    each = sum((record.cost for record in recent), Decimal(0)) / len(recent)
    return (cost + each * max(0, total_steps - recent[-1].step)).quantize(Decimal("0.000001"))
