"""Which instances a job's requests name as sources of new weights."""

import pytest

from rlhfless_functions.api import Heartbeat, Started
from rlhfless_operator.platforms.base import InstanceState, StateChange
from rlhfless_operator.training.instances.relays import Relays


def hears(relays: Relays, version: int, *addresses: str | None) -> None:
    for address in addresses:
        relays.heard(Started(instance=f"pod-{address}", address=address), version)


def is_now(relays: Relays, state: InstanceState, address: str) -> None:
    relays.instance_changed(StateChange(f"pod-{address}", "generation", state, at=0.0))


def test_the_chain_has_the_instances_of_the_version_before() -> None:
    relays = Relays()
    assert relays.chain(0) == []
    hears(relays, 0, "a", "b", None, "c")
    relays.heard(Heartbeat(), 0)
    assert relays.chain(1) == ["a", "b", "c"]


def test_the_chain_of_a_version_stays_as_it_is_while_instances_come() -> None:
    relays = Relays()
    hears(relays, 0, "a", "b")
    first = relays.chain(1)
    hears(relays, 1, "d", "b")
    assert relays.chain(1) == first == ["a", "b"]


def test_an_instance_that_had_no_request_for_a_version_leaves_the_chain() -> None:
    relays = Relays()
    hears(relays, 0, "a", "b")
    relays.chain(1)
    hears(relays, 1, "d", "b")
    assert sorted(relays.chain(2)) == ["b", "d"]


def test_chains_of_two_versions_that_are_asked_for_in_turns_stay_as_they_are() -> None:
    relays = Relays()
    hears(relays, 0, "a", "b")
    older = relays.chain(1)
    hears(relays, 1, "c", "a")
    newer = relays.chain(2)
    hears(relays, 2, "d")
    assert (relays.chain(1), relays.chain(2)) == (older, newer)


def test_a_version_that_is_asked_for_before_any_instance_has_said_anything_gets_its_chain_later() -> None:
    relays = Relays()
    assert relays.chain(1) == []
    hears(relays, 0, "a", "b")
    assert relays.chain(1) == ["a", "b"]


def test_the_chain_of_a_version_stays_while_requests_name_all_versions_that_may_come() -> None:
    relays = Relays()
    hears(relays, 8, "a", "b")
    first = relays.chain(9)
    hears(relays, 9, "c")
    for begun in range(9, 18):
        for version in range(begun + 1, begun + 9):
            relays.chain(version)
    assert relays.chain(9) == first == ["a", "b"]


@pytest.mark.parametrize("state", ["draining", "ended"])
def test_an_instance_that_ends_leaves_the_chain_and_the_others_keep_their_order(state: InstanceState) -> None:
    relays = Relays()
    hears(relays, 0, "a", "b", "c")
    assert relays.chain(1) == ["a", "b", "c"]
    is_now(relays, "idle", "b")
    is_now(relays, state, "a")
    is_now(relays, state, "of another stage")
    assert relays.chain(1) == ["b", "c"]
    hears(relays, 1, "b", "c", "d")
    is_now(relays, "ended", "a")
    assert relays.chain(2) == ["b", "c", "d"]


def test_a_new_instance_with_the_address_of_one_that_has_ended_is_in_the_chain() -> None:
    relays = Relays()
    hears(relays, 0, "a", "b")
    is_now(relays, "draining", "a")
    relays.heard(Started(instance="another", address="a"), 0)
    is_now(relays, "ended", "a")
    assert sorted(relays.chain(1)) == ["a", "b"]
