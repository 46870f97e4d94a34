"""Several jobs on one pool whose instances are slow to start: each has all that it works with, or waits its turn."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from rlhfless_functions.api import Done, Event, RunRequest, Stage, Started
from rlhfless_operator.planner.pools.whole_gpus import SwitchCost
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.pool_member import SwitchCosts
from rlhfless_operator.platforms.turns.whole_gpus import Holder, WaitingJob
from tests.platforms.pooled_jobs import ONE_EACH, Clock, PoolUnderTest, Stepwise, begin, settle


def dear(stage: Stage) -> SwitchCost:
    """What is kept between uses."""
    return SwitchCost(seconds=10.0, gap_seconds=5.0)


async def test_where_switches_are_dear_a_job_has_all_that_it_works_with_or_nothing():
    clock = Clock()
    pool = PoolUnderTest(4, clock)
    told: list[WaitingJob | None] = []
    two: dict[Stage, int] = {"generation": 2}
    a, on_a = await pool.join("a", instances=two, costs=dear)
    b, on_b = await pool.join("b", instances=two, costs=dear, on_wait=told.append)
    await a.hold("generation", 2)
    working = begin(a, "generation", "x")
    await b.hold("preparation", 1)
    waiting = begin(b, "preparation", "y")
    await settle()
    assert (on_a.held["generation"], on_b.held["preparation"], on_b.running) == (2, 0, [])
    assert told == [WaitingJob(4, [Holder("default", "a", 4)], 500.0)]
    assert told[0] is not None
    assert told[0].message("h100", "default") == (
        "waits for its turn on 4 GPUs of pool h100: job a holds 4, for 9 min more or until it is done; a higher"
        " spec.priority goes first"
    )
    assert "a job of another namespace holds 4" in told[0].message("h100", "other")

    # What it keeps is let go once its turn is over; what works is not disturbed.
    clock.now = 500.0
    pool.pool.divide()
    await settle()
    assert (on_a.running, on_a.held["generation"], on_b.running) == (["x"], 1, ["y"])
    assert told[1:] == [None]
    on_a.gates["x"].set()
    await working
    await settle()
    assert on_a.held["generation"] == 0

    # A job that asks for nothing any more gives its turn up.
    on_b.gates["y"].set()
    await waiting
    await b.hold("preparation", 0)
    await settle()
    assert on_a.held["generation"] == 2
    await a.close()
    await b.close()
    assert told[1:] == [None], "a job that has ended does not wait"


async def test_once_its_stages_are_known_a_job_counts_with_what_it_has_asked_for():
    pool = PoolUnderTest(6, Clock())
    a, on_a = await pool.join("a", instances={"generation": 4}, costs=dear)
    b, on_b = await pool.join("b", instances={"generation": 4}, costs=dear)
    await a.hold("generation", 1)
    await b.hold("generation", 1)
    assert (on_a.held, on_b.held) == ({"generation": 1}, {"generation": 0})
    for stage in ("preparation", "learning"):
        await a.hold(stage, 1)
    await settle()
    assert on_b.held == {"generation": 0}, "three and six do not fit"
    for stage in ("preparation", "learning"):
        await b.hold(stage, 1)
    await settle()
    assert on_b.held == {"generation": 1, "preparation": 1, "learning": 1}


async def test_a_turn_ends_by_itself():
    pool = PoolUnderTest(1)
    a, _ = await pool.join("a", costs=lambda stage: SwitchCost(0.001, 0.0005))
    b, on_b = await pool.join("b", costs=lambda stage: SwitchCost(0.001, 0.0005))
    await a.hold("generation", 1)
    task = begin(b, "generation", "x")
    on_b.gates["x"] = asyncio.Event()
    on_b.gates["x"].set()
    assert await asyncio.wait_for(task, 10) == ["started", "done"]
    await a.close()
    await b.close()


async def test_a_job_that_has_its_steps_behind_it_holds_nobody_up():
    over: set[Stage] = set()
    pool = PoolUnderTest(3, Clock())
    a, on_a = await pool.join("a", costs=lambda stage: replace(dear(stage), over=stage in over))
    b, on_b = await pool.join("b", costs=dear)
    for stage in ONE_EACH:
        await a.hold(stage, 1)
    await b.hold("generation", 1)
    assert on_b.held == {"generation": 0}
    over.update(("generation", "preparation"))
    await a.hold("generation", 0)
    await a.hold("preparation", 0)
    await settle()
    assert (on_a.held["learning"], on_b.held) == (1, {"generation": 1})
    await a.close()
    await b.close()


@pytest.mark.parametrize("costs", [lambda stage: SwitchCost(), dear], ids=["cheap switches", "dear switches"])
@pytest.mark.parametrize("gpus", [2, 3, 4])
async def test_jobs_that_generate_while_they_learn_all_come_to_their_end(gpus: int, costs: SwitchCosts):
    """Each needs two GPUs at once to be as fast as it can, and some pools have fewer than all jobs need."""
    clock, steps = Clock(), 6
    pool = PoolUnderTest(gpus, clock)
    at_once: Counter[str] = Counter()

    class Quick(Stepwise):
        async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
            at_once["now"] += 1
            at_once["most"] = max(at_once["most"], at_once["now"])
            clock.now += 60.0
            try:
                yield Started(instance="i")
                await settle()
                yield Done(result={})
            finally:
                at_once["now"] -= 1

    async def stage(shared: JobPlatform, name: Stage, part: str) -> None:
        await shared.hold(name, 1)
        assert await begin(shared, name, part) == ["started", "done"]
        await shared.hold(name, 0)

    async def train(uid: str) -> None:
        wanted: dict[Stage, int] = {"generation": 1, "preparation": 0, "learning": 1}
        shared, _ = await pool.join(uid, Quick(), gpus=wanted, costs=costs)
        ahead = asyncio.create_task(stage(shared, "generation", "1"))
        for step in range(1, steps + 1):
            await ahead
            learning = asyncio.create_task(stage(shared, "learning", str(step)))
            if step < steps:
                ahead = asyncio.create_task(stage(shared, "generation", str(step + 1)))
            await learning
        await shared.close()

    async with asyncio.timeout(60):
        await asyncio.gather(*(train(uid) for uid in "abc"))
    assert 2 <= at_once["most"] <= gpus
