"""Actors and their samples: every sample is some actor's, and what a request said is what is learnt from it."""

import pytest

from rlhfless_functions.api import SampleTask
from rlhfless_operator.training.actors import actor_pool as module
from rlhfless_operator.training.actors.actor_pool import ActorPool, Heard, key_of
from rlhfless_operator.training.actors.generated import Stretch


def samples(count: int) -> list[SampleTask]:
    return [SampleTask(prompt=0, index=index) for index in range(count)]


def test_an_actor_that_is_released_gives_its_number_to_nobody() -> None:
    pool = ActorPool()
    first = pool.open(samples(1))
    pool.release(first)
    second = pool.open(samples(1))
    assert [first.name, second.name] == ["actor-0000", "actor-0001"]
    assert list(pool) == [second] and len(pool) == 1 and pool["actor-0001"] is second


def test_samples_that_are_handed_over_are_nobody_elses() -> None:
    pool = ActorPool()
    source, target = pool.open(samples(4)), pool.open([])
    source.give({(0, 1), (0, 3)}, target)
    assert [key_of(sample) for sample in source.samples] == [(0, 0), (0, 2)]
    assert [key_of(sample) for sample in target.samples] == [(0, 1), (0, 3)]


def test_what_is_finished_is_asked_for_no_more() -> None:
    actor = ActorPool().open(samples(3))
    actor.keep_unfinished({(0, 1): 7}.keys())
    assert [sample.index for sample in actor.samples] == [0, 2]


def test_the_speed_of_a_request_is_learnt_from_its_first_word_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    heard = Heard(begun={(0, 0): 5})
    assert heard.stretch() is None
    heard.now({(0, 0): 5})
    assert heard.stretch() is None, "one word says nothing of speed"
    heard.now({(0, 0): 25})
    assert heard.stretch() == Stretch({(0, 0): 5}, {(0, 0): 25}, 2.0)
