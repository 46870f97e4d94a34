"""Placement: the last to end near the learner, neighbours in time on one node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.placement import Node, place


def test_the_last_to_end_are_nearest_and_neighbours_share_a_node():
    ends = {"a": 10.0, "b": 40.0, "c": 20.0, "d": 30.0}
    placement = place(ends, [Node("far", 2, 1), Node("learner", 2, 0)], gpus_per_actor=1)
    assert placement.nodes == {"b": "learner", "d": "learner", "c": "far", "a": "far"}
    assert placement.unplaced == ()


def test_a_node_that_is_nearly_full_is_filled_first():
    assert place({"a": 1.0}, [Node("empty", 8), Node("used", 2)], gpus_per_actor=2).nodes == {"a": "used"}


def test_what_finds_no_room_is_said():
    placement = place({"a": 1.0, "b": 2.0}, [Node("n", 1)], gpus_per_actor=1)
    assert (placement.nodes, placement.unplaced) == ({"b": "n"}, ("a",))


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(0, 100)),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), max_size=5),
    st.integers(1, 3),
)
def test_no_node_holds_more_than_it_has(ends, shape, gpus):
    nodes = [Node(f"n{k}", free, distance) for k, (free, distance) in enumerate(shape)]
    if nodes and max(node.free_gpus for node in nodes) < gpus:
        return
    placement = place(ends, nodes, gpus_per_actor=gpus)
    assert set(placement.nodes) | set(placement.unplaced) == set(ends)
    for node in nodes:
        assert gpus * sum(name == node.name for name in placement.nodes.values()) <= node.free_gpus


def test_an_actor_larger_than_every_node_is_told_the_most():
    with pytest.raises(ValueError, match=r"gpus_per_actor is 4, .* use at most 2"):
        place({"a": 1.0}, [Node("n", 2)], gpus_per_actor=4)


def test_an_actor_without_gpus_is_refused():
    with pytest.raises(ValueError, match="gpus_per_actor is 0"):
        place({}, [], gpus_per_actor=0)
