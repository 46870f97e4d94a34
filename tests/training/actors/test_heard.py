"""Actors and their samples: every sample is some actor's, and what a request said is what is learnt from it."""

import pytest

from rlhfless_functions.api import SampleTask
from rlhfless_operator.training.actors import heard as module
from rlhfless_operator.training.actors.generated import Stretch
from rlhfless_operator.training.actors.heard import Heard, key_of
from rlhfless_operator.training.actors.rollout_actor import RolloutActor


def test_samples_that_are_given_away_or_finished_are_the_actors_no_more() -> None:
    actor = RolloutActor(0, [SampleTask(prompt=0, index=index) for index in range(4)])
    assert [sample.index for sample in actor.give({(0, 1), (0, 3)})] == [1, 3]
    assert actor.keep_unfinished({(0, 0): 7}.keys())
    assert [key_of(sample) for sample in actor.samples] == [(0, 2)]
    assert not actor.keep_unfinished({(0, 2)})


def test_the_speed_of_a_request_is_learnt_from_its_first_word_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    heard = Heard(begun={(0, 0): 5})
    assert heard.stretch() is None
    heard.now({(0, 0): 5})
    assert heard.stretch() is None, "one word says nothing of speed"
    heard.now({(0, 0): 25})
    assert heard.stretch() == Stretch({(0, 0): 5}, {(0, 0): 25}, 2.0)
