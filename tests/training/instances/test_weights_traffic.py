"""Bytes of new weights by how far they went from the learner."""

from rlhfless_functions.api import Heartbeat, Progress, Started
from rlhfless_operator.training.instances.weights_traffic import ReadsOfVersion, WeightsTraffic

LEARNER = ["n1", "z1"]


def traffic(version: int = 1) -> WeightsTraffic:
    made = WeightsTraffic()
    made.published(version, 100, LEARNER)
    return made


def test_each_instance_counts_a_version_once() -> None:
    counted = traffic()
    counted.read("a", 1, ["n1", "z1"])
    counted.read("a", 1, ["n1", "z1"])
    counted.read("b", 1, ["n2", "z1"])
    counted.read("c", 1, ["n3", "z2"])
    counted.read("d", 1, ["n4"])
    assert counted.take() == {
        "weights/bytes_same_node": 100.0,
        "weights/bytes_same_zone": 100.0,
        "weights/bytes_across_zones": 100.0,
        "weights/bytes_other_node": 100.0,
    }
    assert counted.take() == {}
    counted.published(2, 10, LEARNER)
    counted.read("a", 2, ["n1", "z1"])
    assert counted.take() == {"weights/bytes_same_node": 10.0}


def test_what_was_not_made_here_or_has_no_place_is_not_counted() -> None:
    counted = WeightsTraffic()
    counted.read("a", 0, LEARNER)
    counted.published(1, 100, LEARNER)
    counted.read("a", 0, LEARNER)
    counted.read("a", 1, [])
    assert counted.take() == {}
    counted.published(2, 100, [])
    counted.read("a", 2, LEARNER)
    assert counted.take() == {}


def test_an_actor_counts_once_its_engine_has_the_weights() -> None:
    counted = traffic()
    reads = ReadsOfVersion(counted)
    reads.asks("actor", 1)
    reads("actor", Started(instance="a", place=["n1", "z1"]))
    reads("actor", Heartbeat())
    assert counted.take() == {}, "an instance that is lost while it loads has not read everything"
    progress = Progress(finished=0, running=1, waiting=0, tokens=0)
    reads("actor", progress)
    reads("actor", progress)
    assert counted.take() == {"weights/bytes_same_node": 100.0}


def test_with_an_object_store_what_was_fetched_is_counted() -> None:
    counted = traffic()
    reads = ReadsOfVersion(counted)
    for actor, instance, fetched in (("first", "a", 100), ("second", "b", 30), ("third", "c", 0)):
        reads.asks(actor, 1)
        reads(actor, Started(instance=instance, place=["n1", "z1"]))
        reads(actor, Progress(finished=0, running=1, waiting=0, tokens=0, weights_bytes=fetched))
    assert counted.take() == {"weights/bytes_same_node": 130.0}


def test_an_actor_that_goes_on_with_newer_weights_counts_for_those() -> None:
    counted = traffic()
    reads = ReadsOfVersion(counted)
    for version in (0, 1):
        reads.asks("actor", version)
        reads("actor", Started(instance="a", place=["n1", "z1"]))
        reads("actor", Progress(finished=0, running=1, waiting=0, tokens=0))
        assert counted.take() == ({"weights/bytes_same_node": 100.0} if version else {})
