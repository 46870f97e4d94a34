"""The budget of a job: how much is spent, and whether the next step fits into the rest. Pure functions.

Money and GPU-hours are counted alike. The *rate* of a stage is the share of the budget that an instance-second takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from rlhfless_operator.errors import UserError
from rlhfless_operator.formatting import format_money
from rlhfless_operator.job.charged import Charged
from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.records.forecast import RECENT, recent_steps
from rlhfless_operator.records.record import StepRecord

Rates = Mapping[Charged, Decimal]
"""Cost of an instance-second of each stage, in money or GPU-hours."""


class BudgetExhaustedError(UserError):
    """The next step would take the job past its budget and was not begun, or the step under way did and was cut."""


@dataclass(frozen=True)
class NextStep:
    """The next step, as far as it is known."""

    number: int
    """Number from 1; 0 is the evaluation before the first step."""
    total: int
    """Steps of the whole job."""
    evaluated: bool
    """Whether an evaluation follows it."""
    planned_seconds: float | None = None
    """Planned instance-seconds of its generation, if it is planned already."""


@dataclass(frozen=True)
class BegunSteps:
    """The steps before it that have begun and are not finished, in an asynchronous job or one that plans ahead."""

    steps: Sequence[NextStep]
    money: Decimal
    """Money spent since the last finished step."""
    gpu_seconds: float
    """GPU-seconds charged since the last finished step."""


NOTHING_BEGUN = BegunSteps((), Decimal(0), 0.0)


@dataclass(frozen=True)
class _Limit:
    """One of the two limits of a budget."""

    field: str
    most: Decimal
    spent: Decimal
    on_begun: Decimal
    """Part of it that was spent since the last finished step."""
    rates: Rates
    currency: str | None
    """Currency of the limit; None for GPU-hours."""

    def show(self, amount: Decimal) -> str:
        return format_money(amount, self.currency) if self.currency else f"{float(amount):.4g} GPU-hours"


def used(budget: BudgetSpec | None, spec: RLHFJobSpec, money: Decimal, gpu_seconds: float) -> float | None:
    """Return the spent share of a budget, the larger one of its two limits; None without a budget.

    Args:
        spec: the job's, which has the prices.
        money: spent so far.
        gpu_seconds: GPU-seconds that were charged so far.
    """
    if budget is None:
        return None
    return max(float(limit.spent / limit.most) for limit in _limits(budget, spec, money, gpu_seconds))


def check_budget(
    budget: BudgetSpec | None,
    spec: RLHFJobSpec,
    money: Decimal,
    gpu_seconds: float,
    records: Sequence[StepRecord],
    step: NextStep,
    begun: BegunSteps = NOTHING_BEGUN,
) -> None:
    """Check that a step fits into the budget that remains once the steps before it are finished.

    The first step of a job has no forecast. It may begin while any of the budget is left.

    Args:
        budget: the job's; None for no limit.
        spec: the job's, which has the prices.
        money: spent so far.
        gpu_seconds: GPU-seconds that were charged so far.
        records: of the finished steps.
        step: the next step.
        begun: unfinished steps before it. Their cost so far is in `money` and `gpu_seconds`, too.

    Raises:
        BudgetExhaustedError: it does not fit; the message says what to raise, and how far.
    """
    for limit in _limits(budget, spec, money, gpu_seconds, begun) if budget is not None else ():
        forecast = step_forecast(records, limit.rates, step)
        owed = _owed(limit, records, begun.steps)
        if limit.spent + owed + (forecast or Decimal(0)) > limit.most or limit.spent == limit.most:
            raise BudgetExhaustedError(_message(limit, forecast, owed, records, step))


def check_spent(
    budgets: Sequence[BudgetSpec | None], spec: RLHFJobSpec, money: Decimal, gpu_seconds: float, step: int
) -> None:
    """Check that the step under way has not spent more than the budget: it may take longer than its forecast, or hang.

    Args:
        budgets: the job's as the step began, and as it is now; the larger one counts.
        spec: the job's, which has the prices.
        money: spent so far.
        gpu_seconds: GPU-seconds that were charged so far.
        step: number of the step.

    Raises:
        BudgetExhaustedError: it has; the message says what to raise.
    """
    over: list[_Limit] = []
    for budget in budgets:
        limits = _limits(budget, spec, money, gpu_seconds) if budget is not None else []
        exceeded = [limit for limit in limits if limit.spent > limit.most]
        if not exceeded:
            return
        over += exceeded
    if over:
        limit = over[-1]
        raise BudgetExhaustedError(
            f"step {step} is cut: {limit.show(limit.spent)} of {limit.show(limit.most)} ({limit.field}) are spent;"
            f" raise {limit.field} to go on. What is generated stays"
        )


def _owed(limit: _Limit, records: Sequence[StepRecord], begun: Sequence[NextStep]) -> Decimal:
    """Estimate the rest of the cost of the steps that have begun."""
    forecasts = (step_forecast(records, limit.rates, each) or Decimal(0) for each in begun)
    return max(Decimal(0), sum(forecasts, Decimal(0)) - limit.on_begun)


def step_forecast(records: Sequence[StepRecord], rates: Rates, step: NextStep) -> Decimal | None:
    """Forecast the cost of a step: the most that one of the last steps took, or the cost of its plan if that is more.

    The first step counts only while it is the only one: its instances start cold. A step with an evaluation is compared
    with steps that had one. If there is none yet, its forecast is that of the other steps plus the last evaluation.

    Args:
        records: of the finished steps.
        rates: of an instance-second of each stage.

    Returns:
        None before the first step is finished.
    """
    trained = [record for record in records if record.step > 0]
    if not trained:
        return None
    alike = [record for record in trained[1:] or trained if (record.evaluation is not None) == step.evaluated][-RECENT:]
    most = max(_taken(record, rates) for record in alike or recent_steps(trained) or trained)
    if step.evaluated:
        evaluations = [record for record in records if record.evaluation is not None]
        return most if alike or not evaluations else most + _taken(evaluations[-1], rates)
    return max(most, _planned(alike, rates, step.planned_seconds))


def _planned(alike: Sequence[StepRecord], rates: Rates, seconds: float | None) -> Decimal:
    """Forecast the cost of a step from its planned generation: what the last steps took, and what the plan adds to it.

    Several steps show how much more work generation is than its plan. One step does not: in a short one most of the
    time is what every step takes, whatever its plan. And no plan makes instances start, wait or end for longer.
    """
    planned = [(record, record.plan["expected_instance_seconds"]) for record in alike if record.plan]
    if seconds is None or not planned:
        return Decimal(0)
    mean_planned = sum(each for _, each in planned) / len(planned)
    busy = sum(record.ledger["generation"].busy for record, _ in planned if "generation" in record.ledger)
    scale = busy / len(planned) / mean_planned if len(planned) > 1 and mean_planned else 1.0
    taken = sum((_taken(record, rates) for record in alike), Decimal(0)) / len(alike)
    return taken + _seconds((seconds - mean_planned) * scale) * rates["generation"]


def _taken(record: StepRecord, rates: Rates) -> Decimal:
    taken = (_seconds(record.ledger[stage].seconds) * rates[stage] for stage in rates if stage in record.ledger)
    return sum(taken, Decimal(0))


def _seconds(seconds: float) -> Decimal:
    return Decimal(repr(float(seconds)))


def _limits(
    budget: BudgetSpec, spec: RLHFJobSpec, money: Decimal, gpu_seconds: float, begun: BegunSteps = NOTHING_BEGUN
) -> list[_Limit]:
    limits = []
    if budget.money is not None:
        rates = {stage: price / 3600 for stage, price in spec.instance_prices.items()}
        limits.append(_Limit("spec.budget.money", budget.money, money, begun.money, rates, spec.prices.currency))
    if budget.gpu_hours is not None:
        rates = {stage: Decimal(count) / 3600 for stage, count in spec.instance_gpus.items()}
        most = Decimal(repr(budget.gpu_hours))
        spent, on_begun = _seconds(gpu_seconds) / 3600, _seconds(begun.gpu_seconds) / 3600
        limits.append(_Limit("spec.budget.gpuHours", most, spent, on_begun, rates, None))
    return limits


def _message(
    limit: _Limit, forecast: Decimal | None, owed: Decimal, records: Sequence[StepRecord], step: NextStep
) -> str:
    spent = f"{limit.show(limit.spent)} of {limit.show(limit.most)} ({limit.field}) are spent"
    if forecast is None:
        return f"step {step.number} is not begun: {spent}; raise {limit.field} to go on"
    known = recent_steps(records) or [record for record in records if record.step > 0]
    each = sum((_taken(record, limit.rates) for record in known), Decimal(0)) / len(known)
    whole = limit.show(limit.spent + owed + each * (step.total - step.number + 1))
    alone = ", more than the whole budget" if forecast > limit.most else ""
    before = f", the steps before it take up to {limit.show(owed)} more" if owed else ""
    if recent_steps(records):
        outlook = f"All {step.total} steps will take about {whole}"
    else:
        outlook = (
            f"All {step.total} steps would take {whole} if each took what the first did, which started cold: it is"
            " known better once two steps are finished"
        )
    return (
        f"step {step.number} is not begun: {spent}{before}, and the step takes up to {limit.show(forecast)}{alone};"
        f" raise {limit.field} to go on. {outlook}"
    )
