"""Watching for newer weights while a request decodes: a cache of at most one version, on which nothing depends."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import NextWeights, WeightsReference
from rlhfless_functions.generation import prefetching
from rlhfless_functions.generation.prefetching import WeightsPrefetcher


@pytest.fixture(autouse=True)
def every_look_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(prefetching, "STORE_LOOK_SECONDS", 0.01)


class Fetches:
    """Remembers what was fetched; each fetch may be held up, or fail."""

    def __init__(self, *, fail: bool = False) -> None:
        self.began: list[int] = []
        self.has_ended = False
        self.go_on = threading.Event()
        self.go_on.set()
        self.fail = fail

    def __call__(self, upcoming: NextWeights) -> str:
        self.began.append(upcoming.weights.version)
        went_on = self.go_on.wait(30)
        self.has_ended = True
        assert went_on
        if self.fail:
            raise RuntimeError("the store burns")
        return f"version {upcoming.weights.version}"


def until(true: Callable[[], bool]) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never comes true")


def upcoming(root: str, *versions: int) -> list[NextWeights]:
    return [NextWeights(weights=WeightsReference(version=each, uri=f"{root}/{each}")) for each in versions]


def publish(uri: str) -> None:
    with artifacts.publish(uri) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")


def held_up(root: Path) -> tuple[WeightsPrefetcher, Fetches, NextWeights]:
    """A prefetcher that is in the middle of fetching version 1."""
    prefetcher, fetches = WeightsPrefetcher(), Fetches()
    (one,) = upcoming(str(root), 1)
    publish(one.weights.uri)
    fetches.go_on.clear()
    prefetcher.watch(0, [one], fetches)
    until(lambda: fetches.began == [1])
    return prefetcher, fetches, one


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_a_version_is_fetched_once_it_is_published_and_given_out_once(store: str) -> None:
    prefetcher, fetches = WeightsPrefetcher(), Fetches()
    assert prefetcher.settled is None
    one, two = upcoming(store, 1, 2)
    prefetcher.watch(0, [one, two], fetches)
    assert prefetcher.settled == 0
    assert prefetcher.take(one.weights) is None
    publish(one.weights.uri)
    until(lambda: prefetcher.settled == 1)
    assert fetches.began == [1]
    prefetcher.pause()
    until(lambda: not threads())
    assert prefetcher.settled is None
    assert prefetcher.take(two.weights) is None
    assert prefetcher.take(one.weights) == "version 1"
    assert prefetcher.take(one.weights) is None


def test_the_newest_version_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    prefetcher, fetches = WeightsPrefetcher(), Fetches()
    versions = upcoming(str(tmp_path), 1, 2, 3, 4)
    for each in versions[:2]:
        publish(each.weights.uri)
    prefetcher.watch(0, versions, fetches)
    until(lambda: prefetcher.settled == 2)
    publish(versions[2].weights.uri)
    until(lambda: prefetcher.settled == 3)
    assert fetches.began == [2, 3], "none is fetched that is not the newest"
    assert prefetcher.take(versions[1].weights) is None
    assert prefetcher.take(versions[2].weights) == "version 3"
    prefetcher.stop()


def test_a_request_waits_for_a_version_that_is_being_fetched(tmp_path: Path) -> None:
    prefetcher, fetches, one = held_up(tmp_path)
    prefetcher.pause()
    taken: list[object] = []
    taking = threading.Thread(target=lambda: taken.append(prefetcher.take(one.weights)))
    taking.start()
    time.sleep(0.05)
    assert not taken
    fetches.go_on.set()
    taking.join()
    assert taken == ["version 1"]


def test_the_next_request_keeps_what_is_newer_than_its_own_weights(tmp_path: Path) -> None:
    prefetcher, fetches = WeightsPrefetcher(), Fetches()
    versions = upcoming(str(tmp_path), 1, 2, 3)
    for each in versions[:2]:
        publish(each.weights.uri)
    prefetcher.watch(0, versions, fetches)
    until(lambda: prefetcher.settled == 2)
    prefetcher.watch(1, versions[1:], fetches)
    assert prefetcher.settled == 2
    prefetcher.watch(2, versions[2:], fetches)
    assert prefetcher.take(versions[1].weights) is None, "it is of no use any more, and takes no memory"
    assert fetches.began == [2]
    prefetcher.stop()


def test_a_fetch_that_outlives_its_request_is_not_begun_again(tmp_path: Path) -> None:
    prefetcher, fetches, one = held_up(tmp_path)
    prefetcher.watch(0, [one], fetches)
    assert prefetcher.settled == 0
    fetches.go_on.set()
    until(lambda: prefetcher.settled == 1)
    assert fetches.began == [1]
    assert prefetcher.take(one.weights) == "version 1"


def test_a_version_that_cannot_be_fetched_holds_no_request_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefetcher, fetches = WeightsPrefetcher(), Fetches(fail=True)
    (one,) = upcoming(str(tmp_path), 1)
    publish(one.weights.uri)
    with caplog.at_level(logging.WARNING):
        prefetcher.watch(0, [one], fetches)
        until(lambda: prefetcher.settled == 1)
        until(lambda: not threads())
    assert prefetcher.take(one.weights) is None
    assert fetches.began == [1], "once"
    assert [record.message for record in caplog.records] == [
        "weights version 1 could not be fetched ahead: the store burns"
    ]


def test_a_store_that_does_not_answer_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def silent(uri: str) -> bytes:
        looks.append(uri)
        raise artifacts.ArtifactMissingError("no answer")

    monkeypatch.setattr(prefetching.artifacts, "read_bytes", silent)
    prefetcher, fetches = WeightsPrefetcher(), Fetches()
    with caplog.at_level(logging.WARNING):
        prefetcher.watch(0, upcoming(str(tmp_path), 1), fetches)
        until(lambda: len(looks) > 3)
        prefetcher.stop()
    assert len(caplog.records) == 1 and "no answer" in caplog.text
    until(lambda: not threads())


def test_a_stop_forgets_what_is_there_and_what_is_on_its_way(tmp_path: Path) -> None:
    prefetcher, fetches = WeightsPrefetcher(), Fetches()
    one, two = upcoming(str(tmp_path), 1, 2)
    publish(one.weights.uri)
    prefetcher.watch(0, [one, two], fetches)
    until(lambda: prefetcher.settled == 1)
    prefetcher.stop()
    assert prefetcher.take(one.weights) is None
    until(lambda: not threads())
    fetches.go_on.clear()
    prefetcher.watch(0, [one, two], fetches)
    until(lambda: fetches.began == [1, 1])
    prefetcher.stop()
    assert prefetcher.take(one.weights) is None, "it does not wait for it either"
    fetches.go_on.set()
    until(lambda: not threads())
    assert prefetcher.take(one.weights) is None


def test_a_stop_forgets_the_fetch_of_an_earlier_request(tmp_path: Path) -> None:
    prefetcher, fetches, one = held_up(tmp_path)
    (two,) = upcoming(str(tmp_path), 2)
    prefetcher.watch(0, [two], fetches)
    prefetcher.stop()
    fetches.go_on.set()
    until(lambda: not threads())
    assert fetches.began == [1]
    assert prefetcher.take(one.weights) is None, "nothing stays in memory"


def test_a_request_does_not_wait_for_a_fetch_that_was_forgotten(tmp_path: Path) -> None:
    prefetcher, fetches, one = held_up(tmp_path)
    prefetcher.stop()
    prefetcher.watch(0, upcoming(str(tmp_path), 2), fetches)
    assert prefetcher.take(one.weights) is None
    assert not fetches.has_ended
    prefetcher.stop()
    fetches.go_on.set()
    until(lambda: not threads())
