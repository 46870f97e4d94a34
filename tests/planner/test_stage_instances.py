"""Rollouts that overlap share a stage's instances: none idles while an actor waits, and earlier steps come first."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.stage_instances import RolloutPart, StageInstances


def dealt(instances: StageInstances[str]) -> list[str]:
    found = []
    while (next_one := instances.deal()) is not None:
        found.append(next_one[1])
    return found


def waiting(instances: StageInstances[str], part: RolloutPart, *names: str) -> None:
    for name in names:
        instances.wait(part, name)


@given(plans=st.lists(st.integers(1, 5), min_size=1, max_size=6), choices=st.lists(st.integers(0, 99), max_size=40))
def test_there_are_as_many_at_work_as_the_largest_plan_has_actors_while_any_waits(
    plans: list[int], choices: list[int]
) -> None:
    instances: StageInstances[int] = StageInstances()
    parts = [instances.begin(step, actors) for step, actors in enumerate(plans, 1)]
    for part in parts:
        for _ in range(part.actors):
            instances.wait(part, part.step)
    working: list[RolloutPart] = []
    begun: list[int] = []
    for choice in [*choices, *[0] * sum(plans)]:
        while (found := instances.deal()) is not None:
            working.append(found[0])
            begun.append(found[1])
        most = max((part.actors for part in parts if part.left), default=0)
        assert len(working) >= most or len(begun) == sum(plans)
        if working:
            done = working.pop(choice % len(working))
            done.at_work -= 1
            done.left -= 1
    assert begun == sorted(begun) and len(begun) == sum(plans)
    assert instances.wanted == 0


def test_an_instance_that_is_left_goes_to_the_next_rollout() -> None:
    instances: StageInstances[str] = StageInstances()
    first = instances.begin(1, 3)
    waiting(instances, first, "a", "b", "c")
    assert dealt(instances) == ["a", "b", "c"]
    assert not instances.has_room
    first.at_work, first.left = 2, 2
    assert instances.has_room and instances.wanted == 2
    second = instances.begin(2, 3)
    waiting(instances, second, "d", "e")
    assert dealt(instances) == ["d"]
    assert instances.wanted == 3, "the second rollout has begun, and has work for them"


def test_a_rollout_whose_actors_are_done_has_no_say_in_how_many_there_are() -> None:
    instances: StageInstances[str] = StageInstances()
    large, small = instances.begin(1, 3), instances.begin(2, 1)
    waiting(instances, large, "a")
    waiting(instances, small, "b", "c")
    assert dealt(instances) == ["a", "b", "c"]
    large.at_work, large.left = 0, 0
    waiting(instances, small, "d")
    assert dealt(instances) == [], "two work, and the plan that is left has one"
    instances.end(large)
    small.at_work = 0
    assert dealt(instances) == ["d"]
