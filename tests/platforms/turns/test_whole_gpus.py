"""Several jobs on one pool of GPUs: who may run what."""

import asyncio

import pytest

from rlhfless_functions.api import Gang, LearnRequest
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.platforms.job_platform import JobPlatform
from tests.jobs import export_request
from tests.platforms.pooled_jobs import Clock, PoolUnderTest, begin, settle


async def test_no_more_tasks_run_than_the_pool_has_gpus_for():
    shared, platform = await PoolUnderTest(2).join("a")
    await shared.hold("generation", 3)
    assert platform.held == {"generation": 2}
    tasks = [begin(shared, "generation", part) for part in "xyz"]
    await settle()
    assert platform.running == ["x", "y"]
    platform.gates["x"].set()
    await settle()
    assert platform.running == ["y", "z"]
    for part in "yz":
        platform.gates.setdefault(part, asyncio.Event()).set()
    assert await asyncio.gather(*tasks) == [["started", "done"]] * 3
    await shared.close()


async def test_one_jobs_generation_fills_the_pool_while_another_learns():
    pool = PoolUnderTest(4)
    a, on_a = await pool.join("a")
    b, on_b = await pool.join("b")
    learning = begin(a, "learning", "learn")
    await b.hold("generation", 4)
    tasks = [begin(b, "generation", part) for part in "wxyz"]
    await settle()
    assert (on_a.running, on_b.running) == (["learn"], ["w", "x", "y"])
    on_a.gates["learn"].set()
    await learning
    await settle()
    assert on_b.running == ["w", "x", "y", "z"]
    assert on_b.held == {"generation": 4}
    for gate in on_b.gates.values():
        gate.set()
    await asyncio.gather(*tasks)


async def test_the_higher_priority_gets_what_becomes_free():
    pool = PoolUnderTest(1)
    first, on_first = await pool.join("first")
    low, on_low = await pool.join("low")
    high, on_high = await pool.join("high", priority=5)
    tasks = [begin(first, "learning", "x"), begin(low, "learning", "y"), begin(high, "learning", "z")]
    await settle()
    assert (on_first.running, on_low.running, on_high.running) == (["x"], [], [])
    on_first.gates["x"].set()
    await settle()
    assert (on_low.running, on_high.running) == ([], ["z"])
    on_high.gates["z"].set()
    await settle()
    assert on_low.running == ["y"]
    on_low.gates["y"].set()
    await asyncio.gather(*tasks)


async def test_a_kept_instance_is_let_go_when_another_job_has_nothing():
    clock = Clock()
    pool = PoolUnderTest(1, clock)
    a, on_a = await pool.join("a", keep_alive={"learning": 600.0})
    b, on_b = await pool.join("b")
    await a.hold("learning", 1)
    await a.hold("learning", 0)
    assert on_a.held == {"learning": 1}
    task = begin(b, "generation", "x")
    await settle()
    assert (on_a.held, on_b.running) == ({"learning": 0}, ["x"])
    on_b.gates["x"].set()
    await task
    await settle()
    assert on_a.held == {"learning": 1}
    await a.close()


async def test_an_instance_is_kept_no_longer_than_was_asked():
    clock = Clock()
    pool = PoolUnderTest(4, clock)
    shared, platform = await pool.join("a", keep_alive={"generation": 10.0})
    await shared.hold("generation", 3)
    clock.now = 5.0
    await shared.hold("generation", 1)
    assert platform.held["generation"] == 3
    clock.now = 14.0
    pool.pool.divide()
    await settle()
    assert platform.held["generation"] == 3
    clock.now = 16.0
    pool.pool.divide()
    await settle()
    assert platform.held["generation"] == 1
    await shared.close()


async def test_a_task_that_was_cancelled_while_it_waited_asks_for_nothing():
    pool = PoolUnderTest(1)
    a, on_a = await pool.join("a")
    b, on_b = await pool.join("b")
    running, waiting = begin(a, "learning", "x"), begin(a, "generation", "y")
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    other = begin(b, "learning", "z")
    on_a.gates["x"].set()
    await running
    await settle()
    assert (on_a.running, on_b.running) == ([], ["z"])
    on_b.gates["z"].set()
    await other


async def test_what_a_job_that_ends_held_is_the_others():
    pool = PoolUnderTest(2)
    a, on_a = await pool.join("a")
    b, on_b = await pool.join("b")
    await a.hold("generation", 2)
    await b.hold("generation", 2)
    await settle()
    assert (on_a.held, on_b.held) == ({"generation": 1}, {"generation": 1})
    await a.close()
    await settle()
    assert on_a.closed
    assert on_b.held == {"generation": 2}


async def test_a_pod_without_gpus_waits_for_nobody():
    pool = PoolUnderTest(1)
    a, on_a = await pool.join("a", gpus={"generation": 1, "preparation": 0, "learning": 1})
    tasks = [begin(a, "generation", "x"), begin(a, "preparation", "y")]
    await settle()
    assert on_a.running == ["x", "y"]
    for gate in on_a.gates.values():
        gate.set()
    await asyncio.gather(*tasks)


async def test_a_job_that_can_never_run_is_refused_and_leaves_the_others_alone():
    pool = PoolUnderTest(2)
    a, _ = await pool.join("a")
    with pytest.raises(PlatformUnavailableError, match="pool pool: an instance of learning asks for 4 GPUs"):
        await pool.join("b", gpus={"learning": 4})
    await a.hold("generation", 1)


def a_gang(platform: JobPlatform, name: str, there: int = 4, size: int = 4) -> "list[asyncio.Task[None]]":
    """The tasks of learners that take a step together, as far as they are there."""

    async def run(number: int) -> None:
        gang = Gang(size=size, number=number, meeting=name, within_seconds=1)
        request = export_request(f"{name}-{number}")
        async for _ in platform.run(LearnRequest.model_construct(key=request.key, gang=gang)):
            pass

    return [asyncio.create_task(run(number)) for number in range(there)]


async def test_two_gangs_never_have_a_part_of_the_pool_each() -> None:
    pool = PoolUnderTest(6)
    a, on_a = await pool.join("a")
    b, on_b = await pool.join("b")
    c, on_c = await pool.join("c")
    others = [begin(c, "generation", part) for part in "uvwxyz"]
    await settle()
    gangs = [*a_gang(a, "a"), *a_gang(b, "b")]
    for part in "uvw":
        on_c.gates[part].set()
        await settle()
        assert (on_a.running, on_b.running) == ([], [])
    for part in "xyz":
        on_c.gates[part].set()
    await asyncio.gather(*others)
    await settle()
    assert sorted([len(on_a.running), len(on_b.running)]) == [0, 4]
    first, second = (on_a, on_b) if on_a.running else (on_b, on_a)
    for number, gate in enumerate(first.gates.values(), start=1):
        assert second.running == []
        gate.set()
        await settle()
        if number == 2:
            assert len(second.running) == 4, "four GPUs are free, and the others of the first gang go on"
            break
    for gate in [*first.gates.values(), *second.gates.values()]:
        gate.set()
    await asyncio.gather(*gangs)


async def test_a_gang_asks_for_nothing_until_all_of_it_has_come_and_once_it_is_cancelled() -> None:
    pool = PoolUnderTest(4)
    a, on_a = await pool.join("a")
    incomplete = a_gang(a, "a", there=3)
    await settle()
    assert on_a.running == []
    b, on_b = await pool.join("b")
    tasks = [begin(b, "generation", part) for part in "wxyz"]
    await settle()
    assert on_b.running == ["w", "x", "y", "z"]
    gang = a_gang(a, "another")
    await settle()
    assert on_a.running == []
    for task in [*incomplete, *gang]:
        task.cancel()
    await asyncio.gather(*incomplete, *gang, return_exceptions=True)
    on_b.gates["w"].set()
    await settle()
    again = begin(b, "generation", "again")
    await settle()
    assert on_b.running == ["x", "y", "z", "again"], "nothing is kept for a gang that is gone"
    for gate in on_b.gates.values():
        gate.set()
    await asyncio.gather(*tasks, again)
    await a.close()
