"""A job's status after one more step: what a step adds, what it replaces, and what it leaves as it was."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.api import STAGES, LearnResult, Stage, WeightsReference
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.records.status import (
    RECENT_STEPS,
    CheckpointStatus,
    RLHFJobStatus,
    StepStatus,
)
from rlhfless_operator.training.journal.finished_step import record_with, status_after
from rlhfless_operator.training.journal.ledger import CHARGED_STATES, Account

HOUR = dict.fromkeys(STAGES, Decimal("7.20"))
GPUS: dict[Stage, int] = {"generation": 2, "preparation": 0, "learning": 4}
BEFORE = RLHFJobStatus(
    phase="Running",
    uid="0b1f",
    stage="learning",
    step=4,
    steps=9,
    prompts=1000,
    weights=WeightsReference(version=4, uri="/runs/chat/weights/step-4"),
    critic=WeightsReference(version=4, uri="/runs/chat/critics/step-4"),
    checkpoint=CheckpointStatus(step=4, uri="/runs/chat/checkpoints/step-4"),
    best=WeightsReference(version=2, uri="/runs/chat/weights/step-2"),
    best_evaluation=0.5,
    reward=0.25,
    actors=3,
    seconds=100.0,
    instance_seconds=250.0,
    gpu_seconds=500.0,
    idle_seconds=20.0,
    cost=Decimal("0.500000"),
    message="resumed",
    recent_steps=[StepStatus(step=4, reward=0.25, seconds=30.0, actors=3, cost=Decimal("0.200000"))],
)
ACCOUNT = Account({("generation", "busy"): 60.0, ("generation", "idle"): 5.0, ("learning", "idle"): 10.0})


def record(step: int = 5, **given: Any) -> StepRecord:
    return StepRecord(step=step, **{"seconds": 40.0, "plan": {"actors": 2}, "metrics": {"reward": 0.75}, **given})


def learned(step: int = 5, **given: Any) -> LearnResult:
    weights = WeightsReference(version=step, uri=f"/runs/chat/weights/step-{step}")
    return LearnResult(**{"weights": weights, "metrics": {}, **given})


def after(
    before: RLHFJobStatus, finished: StepRecord, made: LearnResult | None, *, keep_best: bool = False
) -> RLHFJobStatus:
    return status_after(before, finished, ACCOUNT, made, prices=HOUR, gpus=GPUS, keep_best=keep_best)


# --- what a step adds and replaces -------------------------------------------------------------------------------


def test_a_step_adds_its_time_and_money_and_replaces_what_is_newest() -> None:
    critic = WeightsReference(version=5, uri="/runs/chat/critics/step-5")
    brief = StepStatus(step=5, reward=0.75, seconds=40.0, actors=2, cost=Decimal("0.150000"))
    assert after(BEFORE, record(), learned(critic=critic)) == BEFORE.model_copy(
        update={
            "step": 5,
            "weights": WeightsReference(version=5, uri="/runs/chat/weights/step-5"),
            "critic": WeightsReference(version=5, uri="/runs/chat/critics/step-5"),
            "reward": 0.75,
            "actors": 2,
            "seconds": 140.0,
            "instance_seconds": 325.0,
            "gpu_seconds": 500.0 + 2 * 65.0 + 4 * 10.0,
            "idle_seconds": 35.0,
            "cost": Decimal("0.650000"),
            "recent_steps": [*BEFORE.recent_steps, brief],
        }
    )


def test_the_status_before_stays_as_it_was() -> None:
    before = BEFORE.model_copy(deep=True)
    after(before, record(evaluation={"reward": 0.9}), learned(checkpoint="/runs/chat/checkpoints/step-5"))
    assert before == BEFORE


def test_the_evaluation_before_the_first_step_costs_and_trains_nothing() -> None:
    before = RLHFJobStatus(phase="Running", uid="0b1f", steps=9, prompts=1000)
    evaluated = record(0, plan=None, metrics={}, evaluation={"reward": 0.5})
    spent = {"seconds": 40.0, "instance_seconds": 75.0, "gpu_seconds": 170.0, "idle_seconds": 15.0}
    assert after(before, evaluated, None) == before.model_copy(update={**spent, "cost": Decimal("0.150000")})


def test_the_weights_of_an_adapter_name_it() -> None:
    adapted = WeightsReference(version=5, uri="/models/base", adapter="/runs/chat/weights/step-5")
    status = after(BEFORE, record(), learned(weights=adapted))
    assert status.weights == WeightsReference(version=5, uri="/models/base", adapter="/runs/chat/weights/step-5")


def test_a_step_in_which_nothing_could_be_scored_has_no_reward() -> None:
    status = after(BEFORE, record(metrics={}), learned())
    assert status.reward is None
    assert status.recent_steps[-1].reward is None


def test_the_checkpoint_is_the_newest_that_there_is() -> None:
    status = after(BEFORE, record(), learned())
    assert status.checkpoint == BEFORE.checkpoint
    status = after(status, record(6), learned(6, checkpoint="/runs/chat/checkpoints/step-6"))
    assert status.checkpoint == CheckpointStatus(step=6, uri="/runs/chat/checkpoints/step-6")


# --- the best evaluation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "version", "best"),
    [
        ({1: 0.2}, 1, 0.2),
        ({1: 0.2, 2: 0.3}, 2, 0.3),
        ({1: 0.3, 2: 0.2}, 1, 0.3),
        ({1: 0.3, 2: 0.3}, 1, 0.3),
        ({1: 0.3, 2: None, 3: 0.4}, 3, 0.4),
        ({0: 0.1, 1: 0.2}, 1, 0.2),
        ({1: 0.0}, 1, 0.0),
        ({1: None}, None, None),
    ],
    ids=["the first", "better", "worse", "as good", "seldom", "better than before", "none right", "never"],
)
def test_the_best_weights_are_the_first_with_the_highest_reward(
    rewards: dict[int, float | None], version: int | None, best: float | None
) -> None:
    status = RLHFJobStatus()
    for step, reward in rewards.items():
        evaluation = None if reward is None else {"reward": reward}
        status = after(status, record(step, evaluation=evaluation), learned(step) if step else None, keep_best=True)
    assert status.best_evaluation == best
    kept = None if version is None else WeightsReference(version=version, uri=f"/runs/chat/weights/step-{version}")
    assert status.best == kept


def test_no_weights_are_kept_where_none_are_better_than_the_model_as_given() -> None:
    status = RLHFJobStatus(weights=WeightsReference(version=0, uri="/models/base"))
    status = after(status, record(0, evaluation={"reward": 0.5}), None, keep_best=True)
    status = after(status, record(1, evaluation={"reward": 0.4}), learned(1), keep_best=True)
    assert (status.best, status.best_evaluation) == (None, 0.5)


def test_the_best_is_not_looked_for_unless_it_is_kept() -> None:
    status = after(BEFORE, record(evaluation={"reward": 0.9}), learned(), keep_best=False)
    assert (status.best, status.best_evaluation) == (BEFORE.best, BEFORE.best_evaluation)


# --- many steps --------------------------------------------------------------------------------------------------


def test_cents_add_up_exactly() -> None:
    """Ten times a tenth is one, which it is not in floating point."""
    status = RLHFJobStatus()
    tenth_of_an_hour = Account({("learning", "busy"): 360.0})
    for step in range(1, 11):
        status = status_after(
            status,
            record(step),
            tenth_of_an_hour,
            learned(step),
            prices=dict.fromkeys(STAGES, Decimal(1)),
            gpus=GPUS,
            keep_best=False,
        )
    assert status.cost == Decimal("1.000000")
    assert isinstance(status.cost, Decimal)


def test_no_more_steps_are_told_in_brief_than_the_status_has_room_for() -> None:
    status = RLHFJobStatus()
    for step in range(1, RECENT_STEPS + 4):
        status = after(status, record(step), learned(step))
    assert [brief.step for brief in status.recent_steps] == list(range(4, RECENT_STEPS + 4))


seconds = st.floats(0, 1e5)
accounts = st.dictionaries(st.tuples(st.sampled_from(STAGES), st.sampled_from(CHARGED_STATES)), seconds).map(Account)


@given(
    steps=st.lists(st.tuples(seconds, accounts), min_size=1, max_size=2 * RECENT_STEPS),
    hour=st.decimals(0, 100, places=2),
)
def test_totals_are_the_sums_over_all_steps_and_the_last_are_kept_in_brief(
    steps: list[tuple[float, Account]], hour: Decimal
) -> None:
    status = RLHFJobStatus()
    for step, (took, account) in enumerate(steps, start=1):
        finished = record(step, seconds=took)
        prices = dict.fromkeys(STAGES, hour)
        status = status_after(status, finished, account, learned(step), prices=prices, gpus=GPUS, keep_best=False)
    assert status.step == len(steps)
    assert status.seconds == pytest.approx(sum(took for took, _ in steps))
    assert status.instance_seconds == pytest.approx(sum(sum(account.seconds.values()) for _, account in steps))
    assert status.idle_seconds == pytest.approx(
        sum(took for _, account in steps for (_, state), took in account.seconds.items() if state == "idle")
    )
    assert status.gpu_seconds == pytest.approx(sum(account.gpu_seconds(GPUS) for _, account in steps))
    costs = [account.cost(dict.fromkeys(STAGES, hour)) for _, account in steps]
    assert status.cost == sum(costs)
    told = [(brief.step, brief.seconds, brief.cost) for brief in status.recent_steps]
    everything = [(step, took, cost) for step, ((took, _), cost) in enumerate(zip(steps, costs, strict=True), start=1)]
    assert told == everything[-RECENT_STEPS:]
    assert RLHFJobStatus.model_validate_json(status.model_dump_json(by_alias=True)) == status


# --- what comes after a step -------------------------------------------------------------------------------------


def test_what_instances_do_later_is_added_to_the_record_of_a_step() -> None:
    before = record(ledger={"learning": {"busy": 3.0, "cost": "0.006000"}})
    later = record_with(before, ACCOUNT, prices=HOUR)
    assert (later.ledger["learning"].busy, later.ledger["learning"].idle) == (3.0, 10.0)
    assert later.ledger["generation"].seconds == 65.0
    assert later.cost == Decimal("0.006000") + HOUR["learning"] * 75 / 3600
    assert before.cost == Decimal("0.006000")
