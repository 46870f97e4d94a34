"""What a driver knows of a learner that it hears."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_functions.api import Started, Waiting
from rlhfless_operator.training.stages import learner_listener
from rlhfless_operator.training.stages.learner_listener import LearnerListener


def test_work_is_the_time_in_which_it_did_not_wait_in_all_attempts_since_it_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(learner_listener.time, "monotonic", lambda: now[0])
    journal: Any = SimpleNamespace(ledger=SimpleNamespace(observe=lambda change: None))
    listener, found = LearnerListener(journal), []
    for event, seconds in (
        (Started(instance="a"), 4.0),
        (Waiting(waiting=True, pieces=1), 10.0),
        (Waiting(waiting=False), 3.0),
    ):
        listener(event)
        now[0] += seconds
        found.append(listener.worked_seconds)
    assert found == [4.0, 4.0, 7.0]
    listener.begins({})
    now[0] += 5.0
    assert listener.worked_seconds == 7.0, "its next attempt has not begun"
    listener(Started(instance="a"))
    now[0] += 1.0
    assert listener.worked_seconds == 8.0
    listener.lost()
    assert listener.worked_seconds == 0.0
