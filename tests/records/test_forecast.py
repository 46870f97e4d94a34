"""The forecast of a job's cost: what is spent, and the mean of the last steps for each one to come."""

from decimal import Decimal

from rlhfless_operator.records.forecast import RECENT, forecast_cost
from rlhfless_operator.records.record import StageAccount, StepRecord


def record(step: int, cost: str) -> StepRecord:
    return StepRecord(step=step, ledger={"generation": StageAccount(cost=Decimal(cost))})


def test_the_forecast_goes_by_the_last_steps() -> None:
    late = [record(step, "100") for step in range(1, 6)] + [record(step, "2") for step in range(6, 6 + RECENT)]
    assert forecast_cost(Decimal(516), late, 20) == 516 + (20 - 5 - RECENT) * 2


def test_before_the_first_step_there_is_none() -> None:
    assert forecast_cost(Decimal(7), [], 10) is None
    assert forecast_cost(Decimal(7), [record(0, "100")], 10) is None, "an evaluation before the first is no step"


def test_one_step_alone_is_no_basis_and_the_first_never_counts() -> None:
    """It starts cold, or it is short: either way the others are not like it."""
    assert forecast_cost(Decimal(100), [record(1, "100")], 48) is None
    assert forecast_cost(Decimal(102), [record(1, "100"), record(2, "2")], 48) == 102 + 46 * 2
    assert forecast_cost(Decimal(2), [record(1, "0.01"), record(2, "1.99")], 48) == 2 + 46 * Decimal("1.99")
    assert forecast_cost(Decimal(100), [record(1, "100")], 1) == 100, "nothing is left"


def test_after_the_last_step_it_is_what_was_spent() -> None:
    assert forecast_cost(Decimal(200), [record(1, "100"), record(2, "100")], 2) == 200
