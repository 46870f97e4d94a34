"""The budget: what is spent of it, what a step will take, and that none is begun which takes a job past it."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.records.forecast import RECENT
from rlhfless_operator.records.record import StageAccount, StepRecord
from rlhfless_operator.training.journal.budget import (
    BegunSteps,
    BudgetExhaustedError,
    NextStep,
    check_budget,
    check_spent,
    step_forecast,
    used,
)
from tests.jobs import job

RATES = {"generation": Decimal(2), "preparation": Decimal(1), "learning": Decimal(10)}
"""Of an instance-second."""


def step(number: int, generation: float = 0.0, learning: float = 0.0, **more: Any) -> StepRecord:
    ledger = {"generation": StageAccount(busy=generation), "learning": StageAccount(idle=learning)}
    return StepRecord(step=number, ledger=ledger, **more)


def following(number: int = 9, *, evaluated: bool = False, planned: float | None = None) -> NextStep:
    return NextStep(number, 20, evaluated, planned)


def spec(**more: Any) -> RLHFJobSpec:
    """Of a job in which an instance-second costs 1."""
    return job(**{"prices": {"instanceHour": "3600"}, **more}).spec


def check(budget: BudgetSpec | None, money: str, records: list[StepRecord], number: int = 9, **more: Any) -> None:
    check_budget(budget, spec(**more), Decimal(money), float(money), records, following(number))


# --- what a step will take ---


def test_before_the_first_step_nothing_is_known() -> None:
    assert step_forecast([], RATES, following(1)) is None
    assert step_forecast([step(0, 100.0, evaluation={"reward": 0.5})], RATES, following(1)) is None


def test_a_step_takes_what_the_dearest_of_the_last_ones_took() -> None:
    records = [step(1, 100.0), step(2, 3.0, 1.0), step(3, 2.0, 0.5)]
    assert step_forecast(records, RATES, following()) == 2 * 3 + 10
    assert step_forecast([*records, step(4, 50.0)], RATES, following()) == 100
    assert step_forecast([*records, step(4, 50.0), *(step(5 + n, 1.0) for n in range(RECENT))], RATES, following()) == 2


def test_the_first_step_counts_only_while_it_is_the_only_one() -> None:
    first = step(1, 100.0)
    assert step_forecast([first], RATES, following()) == 200
    assert step_forecast([first, step(2, 3.0)], RATES, following()) == 6
    assert step_forecast([first, step(2, 3.0, evaluation={})], RATES, following()) == 6, "an evaluation's cost is above"


def test_seconds_asleep_take_nothing() -> None:
    record = StepRecord(step=1, ledger={"learning": StageAccount(asleep=100.0, switching=2.0)})
    assert step_forecast([record], RATES, following()) == 20


def test_a_step_that_is_planned_to_generate_more_takes_more() -> None:
    """As much more as the steps before took more than their plans."""
    records = [step(n, 6.0, 1.0, plan={"expected_instance_seconds": 4.0}) for n in (1, 2, 3)]
    assert step_forecast(records, RATES, following(planned=4.0)) == 2 * 6 + 10
    assert step_forecast(records, RATES, following(planned=8.0)) == 2 * 12 + 10
    assert step_forecast(records, RATES, following(planned=1.0)) == 2 * 6 + 10, "never less than the last steps took"


def test_after_one_short_step_a_longer_plan_adds_what_it_is_longer_by() -> None:
    """A step with a plan of 0.1 s started cold for 20 s and worked for 1 s. One of 2.1 s is not 21 times that."""
    ledger = {"generation": StageAccount(starting=20.0, busy=1.0, idle=9.0)}
    short = StepRecord(step=1, ledger=ledger, plan={"expected_instance_seconds": 0.1})
    assert step_forecast([short], RATES, following(planned=2.1)) == 2 * 32


def test_a_longer_plan_does_not_make_instances_start_or_wait_for_longer() -> None:
    ledger = {"generation": StageAccount(starting=20.0, busy=8.0, idle=2.0)}
    records = [StepRecord(step=n, ledger=ledger, plan={"expected_instance_seconds": 4.0}) for n in (1, 2, 3)]
    assert step_forecast(records, RATES, following(planned=8.0)) == 2 * (20 + 16 + 2)


def test_a_step_with_an_evaluation_is_compared_with_its_like() -> None:
    before, evaluated = step(0, 5.0, evaluation={}), step(4, 9.0, evaluation={})
    records = [before, step(1, 3.0), step(2, 2.0)]
    assert step_forecast(records, RATES, following(evaluated=True)) == 2 * 2 + 2 * 5
    assert step_forecast([*records, evaluated], RATES, following(evaluated=True)) == 2 * 9
    assert step_forecast([*records, evaluated], RATES, following()) == 2 * 2
    assert step_forecast([evaluated], RATES, following()) == 2 * 9


def test_after_one_step_the_message_does_not_take_all_steps_for_such_ones() -> None:
    with pytest.raises(BudgetExhaustedError) as caught:
        check(BudgetSpec(money=Decimal(15)), "10", [step(1, 10.0)], 2)
    assert str(caught.value).endswith(
        "raise spec.budget.money to go on. All 20 steps would take 200.00 USD if each took what the first did, which"
        " started cold: it is known better once two steps are finished"
    )


# --- what is allowed ---


def test_without_a_budget_everything_is_allowed() -> None:
    check(None, "1000000", [step(1, 10.0)])


def test_a_step_that_fits_exactly_is_begun() -> None:
    records = [step(1, 10.0)]
    check(BudgetSpec(money=Decimal(30)), "20", records)
    with pytest.raises(BudgetExhaustedError):
        check(BudgetSpec(money=Decimal("29.999999")), "20", records)


def test_the_first_step_is_begun_as_long_as_anything_is_left() -> None:
    check(BudgetSpec(money=Decimal("0.000001")), "0", [], 1)
    with pytest.raises(BudgetExhaustedError, match=r"raise spec.budget.money to go on"):
        check(BudgetSpec(money=Decimal(3)), "3", [step(0, 3.0, evaluation={})], 1)


def test_the_message_says_what_is_spent_and_what_to_raise() -> None:
    with pytest.raises(BudgetExhaustedError) as caught:
        check(BudgetSpec(money=Decimal("25.00")), "20", [step(1, 90.0), step(2, 10.0), step(3, 8.0)])
    assert str(caught.value) == (
        "step 9 is not begun: 20.00 USD of 25.00 USD (spec.budget.money) are spent, and the step takes up to 10.00 USD;"
        " raise spec.budget.money to go on. All 20 steps will take about 128.00 USD"
    )


def test_steps_that_are_begun_are_paid_for_first() -> None:
    """Each takes 10; 30 are spent, 5 of them on two steps that are not finished."""
    begun = BegunSteps([following(8), following(9)], Decimal(5), 5.0)
    records = [step(n, 10.0) for n in range(6, 8)]

    def check_at(most: str) -> None:
        money = BudgetSpec(money=Decimal(most))
        check_budget(money, spec(), Decimal(30), 30.0, records, following(10), begun)

    check_at("55")
    with pytest.raises(BudgetExhaustedError) as error:
        check_at("54.99")
    assert str(error.value) == (
        "step 10 is not begun: 30.00 USD of 54.99 USD (spec.budget.money) are spent, the steps before it take up to"
        " 15.00 USD more, and the step takes up to 10.00 USD; raise spec.budget.money to go on. All 20 steps will take"
        " about 155.00 USD"
    )


def test_an_evaluation_of_a_step_that_is_begun_is_paid_for_first() -> None:
    records = [step(0, 7.0, evaluation={"reward": 0.5}), step(1, 10.0)]
    begun = BegunSteps([following(2, evaluated=True)], Decimal(0), 0.0)
    check_budget(BudgetSpec(money=Decimal(44)), spec(), Decimal(17), 17.0, records, following(3), begun)
    with pytest.raises(BudgetExhaustedError):
        check_budget(BudgetSpec(money=Decimal(43)), spec(), Decimal(17), 17.0, records, following(3), begun)


def test_steps_that_took_more_than_forecast_owe_nothing() -> None:
    begun = BegunSteps([following(2)], Decimal(12), 12.0)
    check_budget(BudgetSpec(money=Decimal(32)), spec(), Decimal(22), 22.0, [step(1, 10.0)], following(3), begun)


def test_a_budget_below_one_step_is_told_so() -> None:
    with pytest.raises(BudgetExhaustedError, match=r"up to 10.00 USD, more than the whole budget; raise"):
        check(BudgetSpec(money=Decimal(9)), "10", [step(1, 10.0)], 2)


def test_gpu_hours_count_the_gpus_of_each_instance() -> None:
    pods = {"resources": {"limits": {"nvidia.com/gpu": 4}}}
    records, budget = [step(1, 3600.0, 3600.0)], BudgetSpec(gpu_hours=8.0)
    check_budget(budget, spec(learning={"pods": pods}), Decimal(0), 4 * 3600.0, records, following())
    with pytest.raises(BudgetExhaustedError, match=r"4.1 GPU-hours of 8 GPU-hours \(spec.budget.gpuHours\) are spent"):
        check_budget(budget, spec(learning={"pods": pods}), Decimal(0), 4.1 * 3600.0, records, following())


def test_of_two_limits_the_nearer_one_counts() -> None:
    budget = BudgetSpec(money=Decimal(1000), gpu_hours=0.01)
    assert used(budget, spec(), Decimal(100), 18.0) == pytest.approx(0.5)
    assert used(budget, spec(), Decimal(900), 18.0) == pytest.approx(0.9)
    assert used(None, spec(), Decimal(900), 18.0) is None
    with pytest.raises(BudgetExhaustedError, match=r"spec.budget.gpuHours"):
        check(budget, "30", [step(1, 10.0)])


def test_a_step_under_way_is_cut_once_the_budget_is_spent() -> None:
    small, large = BudgetSpec(money=Decimal(100)), BudgetSpec(money=Decimal(200), gpu_hours=1.0)
    for budgets, money, seconds in [
        ([small, small], 100, 0.0),
        ([small, large], 150, 0.0),
        ([large, small], 150, 0.0),
        ([None, small], 150, 0.0),
        ([small, None], 150, 0.0),
        ([None, None], 150, 0.0),
    ]:
        check_spent(budgets, spec(), Decimal(money), seconds, 3)
    with pytest.raises(BudgetExhaustedError, match=r"step 3 is cut: .*\(spec.budget.money\) are spent; raise"):
        check_spent([small, small], spec(), Decimal("100.01"), 0.0, 3)
    with pytest.raises(BudgetExhaustedError, match=r"spec.budget.gpuHours"):
        check_spent([large, large], spec(), Decimal(1), 3601.0, 3)


@given(
    costs=st.lists(st.decimals("0.01", 100, places=2), min_size=1, max_size=30),
    budget=st.decimals("0.01", 1000, places=2),
)
def test_as_long_as_no_step_is_dearer_than_those_before_the_budget_is_kept(
    costs: list[Decimal], budget: Decimal
) -> None:
    """The first step alone may pass it: nothing is known of it."""
    spent, records = Decimal(0), []
    for number, cost in enumerate(sorted(costs, reverse=True), start=1):
        try:
            check(BudgetSpec(money=budget), str(spent), records, number)
        except BudgetExhaustedError:
            assert spent + max(map(seconds_of, records[-RECENT:])) > budget
            break
        spent += cost
        records.append(step(number, float(cost)))
        assert spent <= budget or number == 1


def seconds_of(record: StepRecord) -> Decimal:
    return Decimal(repr(record.ledger["generation"].seconds))
