"""What a learner that follows preparation finds, and can expect."""

import math
from pathlib import Path

import pytest

from rlhfless_functions.api import SampleTask
from rlhfless_operator.planner.step.generation import GroupForecast
from rlhfless_operator.planner.step.pace import LearnerPace
from rlhfless_operator.training.stages import arrivals
from rlhfless_operator.training.stages.arrivals import Arrivals
from rlhfless_operator.training.stages.piece_journal import PieceJournal

PACE = LearnerPace(start_seconds=2.0, switch_seconds=4.0)
FORECAST = GroupForecast(ready={1: 10.0, 2: 20.0, 3: 100.0}, learning={1: 3.0, 2: 4.0, 3: 1.0}, time_price=1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr(arrivals.time, "monotonic", lambda: now[0])
    return now


def samples(*prompts: int) -> list[SampleTask]:
    return [SampleTask(prompt=prompt, index=index) for prompt in prompts for index in range(2)]


def test_a_learner_begins_on_a_backlog_and_not_before(tmp_path: Path, clock: list[float]) -> None:
    journal = PieceJournal(str(tmp_path / "pieces"))
    found = Arrivals(FORECAST, journal, 3)
    journal.prepared(samples(1), "first")
    clock[0] = 50.0 + 12
    assert found.suffice_in(PACE, 0) > 0
    journal.prepared(samples(2), "second")
    assert found.suffice_in(PACE, 0) <= 0, "7 s of work are worth more than three starts of 2 s"
    assert found.suffice_in(PACE, 1) > 0, "but 4 s are not"
    # Where it begins at 94 s it is done with the backlog when the last group comes.
    clock[0] = 50.0 + 95
    assert found.suffice_in(PACE, 1) <= 0


def test_a_learner_of_a_step_of_which_nothing_is_known_begins_with_half_of_its_groups(tmp_path: Path) -> None:
    journal = PieceJournal(str(tmp_path / "pieces"))
    found = Arrivals(None, journal, 4)
    journal.prepared(samples(1), "first")
    assert found.suffice_in(PACE, 0) == math.inf
    journal.prepared(samples(2), "second")
    assert found.suffice_in(PACE, 0) == 0.0
    assert found.suffice_in(PACE, 1) == 0.0, "it goes on with each piece"


def test_a_learner_is_let_go_that_has_done_all_there_is_and_would_wait_for_long(
    tmp_path: Path, clock: list[float]
) -> None:
    journal = PieceJournal(str(tmp_path / "pieces"))
    found = Arrivals(FORECAST, journal, 3)
    journal.prepared(samples(1), "first")
    clock[0] = 50.0 + 12
    assert found.are_late(PACE, 1), "the next is 8 s away, a switch takes 4 s, and 3 s of work are done again"
    assert not found.are_late(PACE, None), "it works"
    assert not found.are_late(PACE, 0), "there is a piece that it has not seen"
    clock[0] = 50.0 + 14
    assert not found.are_late(PACE, 1), "the next is 6 s away"
    clock[0] = 50.0 + 27.5
    assert found.are_late(PACE, 1), "and is 7.5 s late"
