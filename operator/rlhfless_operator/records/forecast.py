"""Forecasts of a job's time and cost until its end, from its last steps.

The first training step is no example for the others: its instances start cold, and nothing was known of its responses.
So a forecast leaves it out, and is not known before the second step is finished.
"""

from collections.abc import Sequence
from decimal import Decimal

from rlhfless_operator.records.record import StepRecord

RECENT = 8
"""Number of last steps whose means the forecast uses."""


def recent_steps(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the training steps that a forecast uses: the last ones without the first; none before the second."""
    trained = [record for record in records if record.step > 0]
    return trained[1:][-RECENT:]


def forecast_cost(cost: Decimal, records: Sequence[StepRecord], total_steps: int) -> Decimal | None:
    """Forecast the money for the whole job, if the remaining steps cost as much as the last ones. None while it is not
    known: before the second of several steps is finished.

    Args:
        cost: cost so far.
        records: records of the finished steps.
        total_steps: steps of the whole job.
    """
    left = total_steps - max((record.step for record in records), default=0)
    recent = recent_steps(records)
    if left <= 0:
        each = Decimal(0)
    elif not recent:
        return None
    else:
        each = sum((record.cost for record in recent), Decimal(0)) / len(recent)
    return (cost + each * max(0, left)).quantize(Decimal("0.000001"))
