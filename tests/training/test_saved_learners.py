"""Jobs whose learner is let go after each step, with its state saved: what comes out is what one learner makes."""

from collections import Counter
from unittest.mock import AsyncMock

import pytest

from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.records.status import CheckpointStatus
from rlhfless_operator.training.costs.cost_model import CostModel
from rlhfless_operator.training.instances.capacity import Capacity
from rlhfless_operator.training.journal.ledger import Ledger
from rlhfless_operator.training.journal.step_journal import StepJournal
from tests.processes import named
from tests.training.whole_jobs import (
    MakeJob,
    assert_same_final_weights,
    folder_of,
    records_of,
    run_job,
    status_of,
)

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

STEPS = 3
EVALUATION = {"data": {"source": "train.jsonl"}, "everySteps": 2}


@pytest.mark.slow
def test_learners_that_come_and_go_with_each_step_make_the_weights_of_one_that_stays(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the model is evaluated, when the step is not written down yet."""
    stays = tiny_job("stays", steps=STEPS, learning={"keepAlive": "10m"}, evaluation=EVALUATION)
    run_job(stays)
    goes = tiny_job("goes", steps=STEPS, evaluation=EVALUATION)
    saved: list[CheckpointStatus] = []
    save = StepJournal.saved

    def observe(journal: StepJournal, checkpoint: CheckpointStatus) -> None:
        saved.append(checkpoint)
        save(journal, checkpoint)

    with monkeypatch.context() as patched:
        patched.setattr(Capacity, "switch_seconds", lambda capacity, stage: -1.0)
        # On a busy machine a plan may find that all instances stay.
        patched.setattr(Capacity, "stay", AsyncMock())
        patched.setattr(CostModel, "saves_state", lambda costs, steps: True)
        patched.setattr(StepJournal, "saved", observe)
        run_job(goes)
    assert_same_final_weights(goes, stays)
    _, _, *later = records_of(goes)
    for record in later:
        assert record["metrics"].keys() & {"seconds/load", "seconds/taken_up"}, "a fresh learner"
    assert [checkpoint.step for checkpoint in saved] == [1, 2]
    assert status_of(goes)["checkpoint"]["step"] == STEPS
    checkpoints = [path.name for path in (folder_of(goes) / "checkpoints").iterdir()]
    assert checkpoints == [f"step-{STEPS:06d}"], "what learners saved is none of the user's checkpoints"
    assert all("seconds/load" not in record["metrics"] for record in records_of(stays)[2:])


@pytest.mark.nightly
def test_learners_that_are_killed_while_they_load_their_state_are_replaced(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = tiny_job("undisturbed", steps=STEPS)
    run_job(undisturbed)
    killed = tiny_job("killed", steps=STEPS)
    tasks: Counter[str] = Counter()
    victims: list[str] = []
    observe = Ledger.observe

    def listen(ledger: Ledger, change: StateChange) -> None:
        observe(ledger, change)
        if change.stage == "learning" and change.state == "busy":
            tasks[change.instance] += 1
        elif change.stage == "learning" and change.state == "switching" and tasks[change.instance] == 1:
            # Its first task is not a step: it loads its state ahead.
            victims.append(change.instance)
            for process in named(change.instance):
                process.kill()

    with monkeypatch.context() as patched:
        patched.setattr(Capacity, "switch_seconds", lambda capacity, stage: 0.5)
        patched.setattr(CostModel, "saves_state", lambda costs, steps: True)
        patched.setattr(CostModel, "letting_go_seconds", lambda costs, steps: 0.0)
        patched.setattr(CostModel, "taking_up_seconds", lambda costs, steps: 60.0)
        patched.setattr(Ledger, "observe", listen)
        run_job(killed)
    assert victims
    assert_same_final_weights(killed, undisturbed)
