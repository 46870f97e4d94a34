"""The room on GPUs beside the stages at work."""

import pytest

from rlhfless_functions.api import Stage
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus


@pytest.mark.parametrize(
    ("working", "room"),
    [
        ({"generation": 4, "preparation": 1}, False),
        ({"generation": 2, "preparation": 1}, False),
        ({"generation": 1, "preparation": 1}, True),
        ({"generation": 2}, True),
        ({}, True),
    ],
)
def test_a_learner_has_room_once_enough_actors_have_left(working: dict[Stage, int], room: bool) -> None:
    gpus = SharedGpus(4, {"generation": 1, "preparation": 1, "learning": 2})
    assert gpus.has_room("learning", working) is room


def test_a_stage_without_gpus_always_has_room() -> None:
    assert SharedGpus(1, {"generation": 1}).has_room("preparation", {"generation": 1})


@pytest.mark.parametrize(
    ("gpus", "learners", "actors"), [({"generation": 1, "learning": 2}, 1, 6), ({"generation": 3, "learning": 2}, 1, 2)]
)
def test_so_many_actors_have_gpus_beside_others(gpus: dict[Stage, int], learners: int, actors: int) -> None:
    assert SharedGpus(8, gpus).actors_beside({"learning": learners}) == actors
    assert SharedGpus(1, gpus).actors_beside({"learning": learners}) == 0
