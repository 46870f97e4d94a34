"""Placement: what instances prefer, and how far from each other they came to be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.pools.placement import HOSTNAME, TOPOLOGY_KEYS, Preference, distance, preferences

KEYS = st.lists(st.text("abc/", min_size=1, max_size=5), unique=True, max_size=8)
STAGES = st.sampled_from(["generation", "preparation", "learning"])
PLACES = st.lists(st.sampled_from(["", "a", "b"]), max_size=4)


def test_generation_prefers_the_learner_and_then_its_own_kind() -> None:
    zone = TOPOLOGY_KEYS[1]
    assert preferences("generation", TOPOLOGY_KEYS) == [
        Preference("learning", HOSTNAME, 100),
        Preference("learning", zone, 25),
        Preference("generation", HOSTNAME, 10),
        Preference("generation", zone, 2),
    ]
    assert preferences("preparation", TOPOLOGY_KEYS) == preferences("generation", TOPOLOGY_KEYS)


def test_a_learner_prefers_the_nodes_of_its_generation() -> None:
    assert {each.stage for each in preferences("learning", TOPOLOGY_KEYS)} == {"generation"}


@given(STAGES, KEYS)
def test_weights_are_what_kubernetes_takes_and_never_rise_with_distance(stage: str, keys: list[str]) -> None:
    found = preferences(stage, keys)
    assert all(1 <= each.weight <= 100 for each in found)
    for other in {each.stage for each in found}:
        of_stage = [each for each in found if each.stage == other]
        assert [each.topology_key for each in of_stage] == keys
        weights = [each.weight for each in of_stage]
        assert weights == sorted(weights, reverse=True)


@given(STAGES, KEYS)
def test_the_learner_counts_at_least_as_much_as_a_generation_instance(stage: str, keys: list[str]) -> None:
    weights = {(each.stage, each.topology_key): each.weight for each in preferences(stage, keys)}
    for key in keys:
        assert weights.get(("learning", key), 100) >= weights["generation", key]


@pytest.mark.parametrize(
    ("one", "other", "far"),
    [
        (["n1", "rack1", "z1"], ["n1", "rack1", "z1"], "same_node"),
        (["n1"], ["n1", "z1"], "same_node"),
        (["n1", "rack1", "z1"], ["n2", "rack1", "z1"], "same_zone"),
        (["n1", "rack1", "z1"], ["n2", "rack2", "z1"], "same_zone"),
        (["n1", "rack1", ""], ["n2", "rack1", ""], "same_zone"),
        (["n1", "rack1", "z1"], ["n2", "rack2", "z2"], "across_zones"),
        (["n1", "rack1", ""], ["n2", "rack2", ""], "other_node"),
        (["n1", ""], ["n2", ""], "other_node"),
        (["n1"], ["n2", "z1"], "other_node"),
        ([], ["n2", "z1"], None),
        (["", "z1"], ["", "z1"], None),
    ],
)
def test_distance(one: list[str], other: list[str], far: str | None) -> None:
    assert distance(one, other) == far


@given(PLACES, PLACES)
def test_distance_is_the_same_from_both_sides(one: list[str], other: list[str]) -> None:
    assert distance(one, other) == distance(other, one)
    assert distance(one, one) in (None, "same_node")
