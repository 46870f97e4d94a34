"""Jobs whose learner is let go after each step, with its state saved: what comes out is what one learner makes."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from unittest.mock import AsyncMock

import pytest

from rlhfless_functions.api import Event, RunRequest, Started
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.platforms.local.platform import LocalPlatform
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


@pytest.mark.slow
def test_a_checkpoint_is_written_beside_the_generation_of_the_next_step(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its learner is lost the second time, so the step after it writes one."""
    undisturbed = tiny_job("undisturbed", steps=6, checkpoints={"everySteps": 2})
    run_job(undisturbed)
    _, second, third, *_ = records_of(undisturbed)
    assert "seconds/checkpoint" in third["metrics"]
    assert "seconds/checkpoint" not in second["metrics"]
    disturbed = tiny_job("disturbed", steps=6, checkpoints={"everySteps": 2})
    run = LocalPlatform.run
    at: list[tuple[str, int]] = []

    async def listened(platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
        async with aclosing(run(platform, request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    at.append((request.key.part, request.key.step))
                    if at[-1] == ("save", 4):
                        process = platform._processes[event.instance]
                        process.kill()
                yield event

    monkeypatch.setattr(LocalPlatform, "run", listened)
    run_job(disturbed)
    saves = [step for part, step in at if part == "save"]
    assert saves == [2, 4]
    assert at.index(("save", 2)) < next(
        number for number, (part, step) in enumerate(at) if (part, step) == ("learn", 3)
    )
    assert_same_final_weights(disturbed, undisturbed)
    folders = {path.name for path in (folder_of(undisturbed) / "checkpoints").iterdir()}
    assert folders == {"step-000004", "step-000006"}
    assert status_of(disturbed)["checkpoint"]["step"] == 6
    folders = {path.name for path in (folder_of(disturbed) / "checkpoints").iterdir()}
    assert folders == {"step-000005", "step-000006"}


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
