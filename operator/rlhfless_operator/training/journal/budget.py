"""What a job may spend: what of its budget is spent, and whether the next step fits into the rest. Pure functions.

Money and GPU-hours are counted alike: what an instance-second of each stage takes of the budget is its *rate*.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from rlhfless_functions.api import STAGES, Stage
from rlhfless_operator.errors import UserError
from rlhfless_operator.formatting import format_money
from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.records.forecast import RECENT, recent_steps
from rlhfless_operator.records.record import StepRecord

Rates = Mapping[Stage, Decimal]
"""What an instance-second of each stage takes: money, or GPU-hours."""


class BudgetExhaustedError(UserError):
    """The next step would take the job past its budget, and was not begun."""


@dataclass(frozen=True)
class NextStep:
    """The step that is to be begun, as far as it is known."""

    number: int
    """From 1; 0 is the evaluation before the first."""
    total: int
    """Steps of the whole job."""
    evaluated: bool
    """Whether an evaluation follows it."""
    planned_seconds: float | None = None
    """Instance-seconds of generation that are planned for it, where it is planned already."""


@dataclass(frozen=True)
class BegunSteps:
    """The steps before it that are begun and not finished. An asynchronous job has them, as do steps that are planned
    ahead."""

    steps: Sequence[NextStep]
    money: Decimal
    """Spent since the last finished step."""
    gpu_seconds: float
    """Charged since the last finished step."""


NOTHING_BEGUN = BegunSteps((), Decimal(0), 0.0)


@dataclass(frozen=True)
class _Limit:
    """One of the two limits of a budget."""

    field: str
    most: Decimal
    spent: Decimal
    on_begun: Decimal
    """What of it was spent since the last finished step."""
    rates: Rates
    currency: str | None
    """None for GPU-hours."""

    def show(self, amount: Decimal) -> str:
        return format_money(amount, self.currency) if self.currency else f"{float(amount):.4g} GPU-hours"


def used(budget: BudgetSpec | None, spec: RLHFJobSpec, money: Decimal, gpu_seconds: float) -> float | None:
    """The share of a budget that is spent, the larger one of its two; None without a budget.

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
    """Make sure that a step fits into what is left once the steps before it are finished.

    The first step of a job has no forecast. It is begun as long as anything is left.

    Args:
        budget: the job's; None for no limit.
        spec: the job's, which has the prices.
        money: spent so far.
        gpu_seconds: GPU-seconds that were charged so far.
        records: of the finished steps.
        step: the one to begin.
        begun: those before it that are not finished; what was spent on them is in `money` and `gpu_seconds`, too.

    Raises:
        BudgetExhaustedError: it does not fit; the message says what to raise, and how far.
    """
    for limit in _limits(budget, spec, money, gpu_seconds, begun) if budget is not None else ():
        forecast = step_forecast(records, limit.rates, step)
        owed = _owed(limit, records, begun.steps)
        if limit.spent + owed + (forecast or Decimal(0)) > limit.most or limit.spent == limit.most:
            raise BudgetExhaustedError(_message(limit, forecast, owed, records, step))


def _owed(limit: _Limit, records: Sequence[StepRecord], begun: Sequence[NextStep]) -> Decimal:
    """What the steps that are begun will yet take."""
    forecasts = (step_forecast(records, limit.rates, each) or Decimal(0) for each in begun)
    return max(Decimal(0), sum(forecasts, Decimal(0)) - limit.on_begun)


def step_forecast(records: Sequence[StepRecord], rates: Rates, step: NextStep) -> Decimal | None:
    """What a step will take: the most that one of the last steps took, or what its plan says if that is more.

    Only steps with an evaluation are like a step with one. Where there is none yet, it takes what the others did and
    the last evaluation besides.

    Args:
        records: of the finished steps.
        rates: of an instance-second of each stage.

    Returns:
        None before the first step is finished.
    """
    trained = [record for record in records if record.step > 0]
    if not trained:
        return None
    alike = [record for record in trained if (record.evaluation is not None) == step.evaluated][-RECENT:]
    most = max(_taken(record, rates) for record in alike or recent_steps(trained))
    if step.evaluated:
        evaluations = [record for record in records if record.evaluation is not None]
        return most if alike or not evaluations else most + _taken(evaluations[-1], rates)
    return max(most, _planned(alike, rates, step.planned_seconds))


def _planned(alike: Sequence[StepRecord], rates: Rates, seconds: float | None) -> Decimal:
    """What a step takes whose generation is planned, if it compares with its plan as that of the last steps did."""
    planned = sum(record.plan["expected_instance_seconds"] for record in alike if record.plan)
    if seconds is None or not planned:
        return Decimal(0)
    generated = sum(record.ledger["generation"].seconds for record in alike if "generation" in record.ledger)
    rest = sum((_taken(record, rates) for record in alike), Decimal(0)) - _seconds(generated) * rates["generation"]
    return rest / len(alike) + _seconds(seconds * generated / planned) * rates["generation"]


def _taken(record: StepRecord, rates: Rates) -> Decimal:
    taken = (_seconds(record.ledger[stage].seconds) * rates[stage] for stage in STAGES if stage in record.ledger)
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
    recent = recent_steps(records)
    each = sum((_taken(record, limit.rates) for record in recent), Decimal(0)) / len(recent)
    whole = limit.spent + owed + each * (step.total - step.number + 1)
    alone = ", more than the whole budget" if forecast > limit.most else ""
    before = f", the steps before it take up to {limit.show(owed)} more" if owed else ""
    return (
        f"step {step.number} is not begun: {spent}{before}, and the step takes up to {limit.show(forecast)}{alone};"
        f" raise {limit.field} to go on. All {step.total} steps will take about {limit.show(whole)}"
    )
