"""One set of moves at a time: who is cut for it, and when the next question is due."""

import time

import pytest

from rlhfless_operator.planner.moves.migration import Move
from rlhfless_operator.training.actors import moves as module
from rlhfless_operator.training.actors.moves import MoveInProgress


def test_nothing_is_asked_while_a_move_is_under_way() -> None:
    move = MoveInProgress()
    assert move.may_look(now=0.0)
    move.begin([Move("a", ((0, 0),), "b"), Move("a", ((0, 1),), None)], time.monotonic(), look_seconds=0.0)
    assert move.involved == ["a", "b"]
    assert not move.may_look(now=float("inf"))


def test_it_is_over_when_every_actor_that_was_cut_has_ended() -> None:
    move = MoveInProgress()
    move.begin([Move("a", ((0, 0),), "b")], time.monotonic(), look_seconds=0.0)
    assert move.involves("a") and move.involves("b") and not move.involves("c")
    assert not move.ended("b")
    assert not move.involves("b")
    assert move.ended("a")
    move.finish()
    assert move.involved == [] and not move.moves
    assert move.may_look(now=float("inf"))


def test_without_moves_the_next_question_waits_for_the_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 10.0)
    move = MoveInProgress()
    move.begin([], 10.0, look_seconds=0.25)
    assert not move.may_look(10.2) and move.may_look(10.25)


def test_questions_that_take_long_are_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 11.0)
    move = MoveInProgress()
    move.begin([], 10.0, look_seconds=0.25)
    assert not move.may_look(14.9) and move.may_look(15.0), "a second's look is a fifth of the time"
