"""The ledger: whatever the changes of state, the accounts add up to the instances' lifetimes."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.api import STAGES
from rlhfless_operator.job.charged import Charged
from rlhfless_operator.platforms.base import InstanceState, StateChange
from rlhfless_operator.records.record import StageAccount
from rlhfless_operator.training.journal.ledger import Account, Ledger

HOURS: dict[Charged, Decimal] = dict.fromkeys(STAGES, Decimal(3600))
"""An instance-second costs 1."""
LIVING: list[InstanceState] = ["starting", "idle", "busy", "switching", "asleep", "draining"]


@given(
    lives=st.lists(
        st.lists(st.tuples(st.sampled_from(LIVING), st.floats(0, 100)), min_size=1, max_size=8), min_size=1, max_size=5
    ),
    closings=st.lists(st.floats(0, 900), max_size=4),
)
def test_accounts_add_up_to_lifetimes_however_often_they_are_closed(
    lives: list[list[tuple[InstanceState, float]]], closings: list[float]
) -> None:
    happenings: list[tuple[float, StateChange | None]] = [(at, None) for at in closings]
    lifetime = asleep = 0.0
    for number, life in enumerate(lives):
        at = 0.0
        for state, seconds in life:
            happenings.append((at, StateChange(f"i{number}", "generation", state, at)))
            at += seconds
        happenings.append((at, StateChange(f"i{number}", "generation", "ended", at)))
        lifetime += at
        asleep += sum(seconds for state, seconds in life if state == "asleep")
    ledger, total = Ledger(), Account()
    for at, change in sorted(happenings, key=lambda happening: happening[0]):
        if change is None:
            total.add(ledger.close(at))
        else:
            ledger.observe(change)
    total.add(ledger.close(1000.0))
    assert total.total() == pytest.approx(lifetime - asleep)
    assert total.total(state="asleep") == pytest.approx(asleep)
    assert sum(span.end - span.start for span in ledger.take_spans()) == pytest.approx(lifetime)
    assert not ledger.instances()


def test_seconds_and_money_are_kept_by_stage_and_state() -> None:
    ledger = Ledger()
    ledger.observe(StateChange("g", "generation", "starting", 0.0))
    ledger.observe(StateChange("g", "generation", "busy", 2.0))
    ledger.observe(StateChange("l", "learning", "idle", 5.0))
    running = ledger.running(8.0)
    assert running.total("generation", "busy") == 6.0
    account = ledger.close(8.0)
    assert (account.total("generation", "starting"), account.total("generation", "busy")) == (2.0, 6.0)
    assert account.total(state="idle") == 3.0
    assert account.cost(HOURS) == Decimal("11.000000")
    assert account.by_stage(HOURS)["learning"] == StageAccount(idle=3.0, cost=Decimal("3.000000"))


def test_each_stage_has_its_own_price_and_its_own_gpus() -> None:
    ledger = Ledger()
    ledger.observe(StateChange("g", "generation", "busy", 0.0))
    ledger.observe(StateChange("l", "learning", "idle", 0.0))
    ledger.observe(StateChange("p", "preparation", "asleep", 0.0))
    account = ledger.close(10.0)
    prices = {"generation": Decimal("36.00"), "preparation": Decimal("720.00"), "learning": Decimal("3.60")}
    assert account.cost(prices) == Decimal("0.110000")
    assert {stage: each.cost for stage, each in account.by_stage(prices).items()} == {
        "generation": Decimal("0.100000"), "preparation": Decimal(0), "learning": Decimal("0.010000"),
    }  # fmt: skip
    assert account.gpu_seconds({"generation": 2, "preparation": 8, "learning": 4}) == 60.0


def test_servers_of_an_environment_cost_money_and_no_gpu_seconds() -> None:
    ledger = Ledger()
    ledger.observe(StateChange("g", "generation", "busy", 0.0))
    ledger.observe(StateChange("e", "environment", "busy", 0.0))
    account = Account.of(ledger.close(10.0).as_status())
    prices = {**HOURS, "environment": Decimal(36)}
    assert account.gpu_seconds(dict.fromkeys(STAGES, 1)) == 10.0
    assert (account.cost(prices), account.cost(prices, "environment")) == (Decimal("10.1"), Decimal("0.1"))
    assert account.by_stage(prices)["environment"] == StageAccount(busy=10.0, cost=Decimal("0.100000"))
    assert "environment" not in account.by_stage(HOURS)


def test_an_instance_that_sleeps_is_there_and_costs_nothing() -> None:
    ledger = Ledger()
    ledger.observe(StateChange("l", "learning", "switching", 0.0))
    ledger.observe(StateChange("l", "learning", "asleep", 2.0))
    assert ledger.instances() == {("learning", "asleep"): 1}
    ledger.observe(StateChange("l", "learning", "switching", 10.0))
    ledger.observe(StateChange("l", "learning", "busy", 11.0))
    account = ledger.close(15.0).by_stage(HOURS)["learning"]
    assert account == StageAccount(switching=3.0, asleep=8.0, busy=4.0, cost=Decimal("7.000000"))
    assert account.seconds == 7.0
    assert [(span.state, span.end - span.start) for span in ledger.take_spans()] == [
        ("switching", 2.0), ("asleep", 8.0), ("switching", 1.0), ("busy", 4.0),
    ]  # fmt: skip


def test_accounts_of_an_earlier_version_are_read() -> None:
    line = '{"starting": 1, "busy": 2, "idle": 3, "draining": 4, "cost": "0.5"}'
    assert StageAccount.model_validate_json(line).seconds == 10.0


def test_an_instance_that_lives_on_is_charged_to_both_steps() -> None:
    ledger = Ledger()
    ledger.observe(StateChange("l", "learning", "busy", 0.0))
    assert ledger.close(4.0).total() == 4.0
    assert ledger.instances() == {("learning", "busy"): 1}
    assert ledger.close(10.0).total("learning", "busy") == 6.0


def test_the_longest_idle_stretch_of_each_stage_is_told_once() -> None:
    ledger = Ledger()
    for instance, since, until in (("a", 0.0, 4.0), ("b", 1.0, 8.0)):
        ledger.observe(StateChange(instance, "learning", "idle", since))
        ledger.observe(StateChange(instance, "learning", "busy", until))
    ledger.observe(StateChange("c", "generation", "starting", 0.0))
    ledger.observe(StateChange("c", "generation", "busy", 9.0))
    assert ledger.take_longest_idle() == {"learning": 7.0}
    assert ledger.take_longest_idle() == {}
