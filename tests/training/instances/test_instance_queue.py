"""Rollouts under way share instances: none idles while an actor waits, and actors of earlier steps come first."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.training.instances.instance_queue import InstanceQueue, Part
from tests.training.generating import CountedCapacity


def queue() -> tuple[InstanceQueue, CountedCapacity]:
    capacity = CountedCapacity()
    return InstanceQueue("generation", capacity), capacity  # type: ignore[arg-type]


async def passes() -> None:
    """Time, for everybody to go on who can."""
    for _ in range(10):
        await asyncio.sleep(0)


@given(plans=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 1000))
async def test_no_instance_idles_while_an_actor_waits_and_earlier_steps_come_first(plans: list[int], seed: int) -> None:
    chance, (instances, capacity) = random.Random(seed), queue()
    at_work: dict[int, int] = {}
    waiting: dict[int, int] = {}
    left: dict[int, int] = {}

    def check() -> None:
        limit = max((plans[step - 1] for step, count in left.items() if count), default=0)
        assert sum(at_work.values()) <= limit
        assert not sum(waiting.values()) or sum(at_work.values()) == limit

    async def actor(part: Part) -> None:
        waiting[part.step] += 1
        await part.turn()
        assert not [step for step, count in waiting.items() if step < part.step and count], "an earlier step waits"
        waiting[part.step] -= 1
        at_work[part.step] = at_work.get(part.step, 0) + 1
        for _ in range(chance.randrange(30)):
            await asyncio.sleep(0)
        at_work[part.step] -= 1
        left[part.step] -= 1
        part.give(left[part.step])
        await part.has_left(left[part.step])

    async def rollout(step: int) -> None:
        left[step], waiting[step] = plans[step - 1], 0
        async with instances.part(step, plans[step - 1]) as part, asyncio.TaskGroup() as actors:
            for _ in range(plans[step - 1]):
                actors.create_task(actor(part))

    async def watch() -> None:
        while True:
            await passes()
            check()

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as rollouts:
        for step in range(1, len(plans) + 1):
            rollouts.create_task(rollout(step))
    watching.cancel()
    assert not sum(at_work.values()) and not sum(waiting.values())
    assert capacity.counts[-1] == 0, "every instance is released in the end"
    assert max(capacity.counts) == max(plans)


async def test_the_next_rollout_takes_over_what_the_longest_responses_leave() -> None:
    instances, capacity = queue()
    async with instances.part(1, 3) as first:
        for _ in range(3):
            await first.turn()
        first.give()
        await first.has_left(2)
        async with instances.part(2, 3) as second:
            turns = [asyncio.create_task(second.turn()) for _ in range(3)]
            await passes()
            assert [turn.done() for turn in turns] == [True, False, False]
            first.give()
            await first.has_left(1)
            await passes()
            assert [turn.done() for turn in turns] == [True, True, False]
            second.give()
            await second.has_left(2)
            await passes()
            assert all(turn.done() for turn in turns), "its own actors' instances as well"
            await second.has_left(0)
        first.give()
        await first.has_left(0)
    assert capacity.counts == [3, 2, 3, 1, 0]


async def test_a_rollout_that_ends_leaves_no_more_instances_than_the_plans_of_the_others_have() -> None:
    instances, _ = queue()
    async with instances.part(1, 3) as first, instances.part(2, 1) as second, instances.part(3, 2) as third:
        for _ in range(3):
            await first.turn()
        for left in (2, 1):
            first.give(left)
        await second.turn()
        await third.turn()
        waiting = asyncio.create_task(third.turn())
        await passes()
        assert not waiting.done()
        first.give(0)
        await passes()
        assert not waiting.done(), "two rollouts are left, whose plans have one and two instances"
        second.give(0)
        await waiting


async def test_an_actor_that_no_longer_waits_takes_no_instance() -> None:
    instances, _ = queue()
    async with instances.part(1, 1) as first, instances.part(2, 1) as second:
        await first.turn()
        given_up, waits = asyncio.create_task(second.turn()), asyncio.create_task(second.turn())
        await passes()
        given_up.cancel()
        await passes()
        first.give()
        await passes()
        assert given_up.cancelled()
        assert waits.done()
