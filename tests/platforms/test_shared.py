"""Several jobs on one pool of GPUs: who may run what, with a platform whose tasks end when the test says so."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from rlhfless_functions.api import (
    Done,
    Event,
    ExportRequest,
    Gang,
    LearnRequest,
    RunRequest,
    Stage,
    Started,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.settings import ModelSettings
from rlhfless_operator.planner.sharing import Pool
from rlhfless_operator.planner.whole_gpus import SwitchCost
from rlhfless_operator.platforms.base import Preload
from rlhfless_operator.platforms.shared import GpuPool, Holder, PooledJob, SharedPlatform, SwitchCosts, Waiting

ONE_EACH: dict[Stage, int] = {"generation": 1, "preparation": 1, "learning": 1}


class Stepwise:
    """A platform that notes what it is asked for, and whose tasks wait to be let go on."""

    def __init__(self) -> None:
        self.held: dict[Stage, int] = {}
        self.running: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.closed = False

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        self.held[stage] = count

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        name = request.key.part
        self.running.append(name)
        try:
            yield Started(instance=name)
            await self.gates.setdefault(name, asyncio.Event()).wait()
            yield Done(result={})
        finally:
            self.running.remove(name)

    async def close(self) -> None:
        self.closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def join(
    pool: GpuPool, job: str, *, priority: int = 0, gpus=ONE_EACH, keep_alive=None
) -> tuple[SharedPlatform, Stepwise]:
    platform = Stepwise()
    return pool.join(
        platform, PooledJob(job, "default", gpus, priority=priority, keep_alive=keep_alive or {})
    ), platform


def a_task(stage: Stage, part: str) -> ExportRequest:
    return ExportRequest(
        key=TaskKey(job_uid="u", step=1, stage=stage, part=part, attempt=0),
        result="r",
        model=ModelSettings(source="m"),
        weights=WeightsReference(version=0, uri="m"),
        destination="d",
        model_card="",
    )


def begin(platform: SharedPlatform, stage: Stage, part: str) -> "asyncio.Task[list[str]]":
    async def run() -> list[str]:
        return [event.event async for event in platform.run(a_task(stage, part))]

    return asyncio.create_task(run())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_no_more_tasks_run_than_the_pool_has_gpus_for():
    shared, platform = join(GpuPool(Pool(2)), "a")
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
    pool = GpuPool(Pool(4))
    a, on_a = join(pool, "a")
    b, on_b = join(pool, "b")
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
    pool = GpuPool(Pool(1))
    first, on_first = join(pool, "first")
    low, on_low = join(pool, "low")
    high, on_high = join(pool, "high", priority=5)
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
    pool = GpuPool(Pool(1), clock)
    a, on_a = join(pool, "a", keep_alive={"learning": 600.0})
    b, on_b = join(pool, "b")
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
    pool = GpuPool(Pool(4), clock)
    shared, platform = join(pool, "a", keep_alive={"generation": 10.0})
    await shared.hold("generation", 3)
    clock.now = 5.0
    await shared.hold("generation", 1)
    assert platform.held["generation"] == 3
    clock.now = 14.0
    pool.divide()
    await settle()
    assert platform.held["generation"] == 3
    clock.now = 16.0
    pool.divide()
    await settle()
    assert platform.held["generation"] == 1
    await shared.close()


async def test_a_task_that_was_cancelled_while_it_waited_asks_for_nothing():
    pool = GpuPool(Pool(1))
    a, on_a = join(pool, "a")
    b, on_b = join(pool, "b")
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
    pool = GpuPool(Pool(2))
    a, on_a = join(pool, "a")
    b, on_b = join(pool, "b")
    await a.hold("generation", 2)
    await b.hold("generation", 2)
    await settle()
    assert (on_a.held, on_b.held) == ({"generation": 1}, {"generation": 1})
    await a.close()
    await settle()
    assert on_a.closed
    assert on_b.held == {"generation": 2}


async def test_a_pod_without_gpus_waits_for_nobody():
    pool = GpuPool(Pool(1))
    a, on_a = join(pool, "a", gpus={"generation": 1, "preparation": 0, "learning": 1})
    tasks = [begin(a, "generation", "x"), begin(a, "preparation", "y")]
    await settle()
    assert on_a.running == ["x", "y"]
    for gate in on_a.gates.values():
        gate.set()
    await asyncio.gather(*tasks)


async def test_a_job_that_can_never_run_is_refused_and_leaves_the_others_alone():
    pool = GpuPool(Pool(2))
    a, _ = join(pool, "a")
    with pytest.raises(ValueError, match="an instance of learning asks for 4 GPUs"):
        join(pool, "b", gpus={"learning": 4})
    await a.hold("generation", 1)


def a_gang(platform: SharedPlatform, name: str, there: int = 4, size: int = 4) -> "list[asyncio.Task[None]]":
    """The tasks of learners that take a step together, as far as they are there."""

    async def run(number: int) -> None:
        gang = Gang(size=size, number=number, meeting=name, within_seconds=1)
        request = a_task("learning", f"{name}-{number}")
        async for _ in platform.run(LearnRequest.model_construct(key=request.key, gang=gang)):
            pass

    return [asyncio.create_task(run(number)) for number in range(there)]


async def test_two_gangs_never_have_a_part_of_the_pool_each() -> None:
    pool = GpuPool(Pool(6))
    a, on_a = join(pool, "a")
    b, on_b = join(pool, "b")
    c, on_c = join(pool, "c")
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
    pool = GpuPool(Pool(4))
    a, on_a = join(pool, "a")
    incomplete = a_gang(a, "a", there=3)
    await settle()
    assert on_a.running == []
    b, on_b = join(pool, "b")
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


def dear(stage: Stage) -> SwitchCost:
    """What is kept between uses."""
    return SwitchCost(seconds=10.0, gap_seconds=5.0)


async def test_where_switches_are_dear_a_job_has_all_that_it_works_with_or_nothing():
    clock = Clock()
    pool = GpuPool(Pool(4), clock)
    told: list[Waiting | None] = []
    two: dict[Stage, int] = {"generation": 2}
    on_a, on_b = Stepwise(), Stepwise()
    job = PooledJob("uid-a", "default", ONE_EACH, name="a", instances=two, costs=dear)
    a = pool.join(on_a, job)
    b = pool.join(on_b, replace(job, uid="uid-b", name="b", on_wait=told.append))
    await a.hold("generation", 2)
    working = begin(a, "generation", "x")
    await b.hold("preparation", 1)
    waiting = begin(b, "preparation", "y")
    await settle()
    assert (on_a.held["generation"], on_b.held["preparation"], on_b.running) == (2, 0, [])
    assert told == [Waiting(4, [Holder("default", "a", 4)], 500.0)]
    assert told[0] is not None
    assert told[0].message("h100", "default") == (
        "waits for its turn on 4 GPUs of pool h100: job a holds 4, for 9 min more or until it is done; a higher"
        " spec.priority goes first"
    )
    assert "a job of another namespace holds 4" in told[0].message("h100", "other")

    # What it keeps is let go once its turn is over; what works is not disturbed.
    clock.now = 500.0
    pool.divide()
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
    assert told[1:] == [None], "a job that ends waits for nobody"


async def test_once_its_stages_are_known_a_job_counts_with_what_it_has_asked_for():
    pool = GpuPool(Pool(6), Clock())
    on_a, on_b = Stepwise(), Stepwise()
    job = PooledJob("a", "default", ONE_EACH, instances={"generation": 4}, costs=dear)
    a, b = pool.join(on_a, job), pool.join(on_b, replace(job, uid="b"))
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
    pool = GpuPool(Pool(1))
    on_a, on_b = Stepwise(), Stepwise()
    job = PooledJob("a", "default", ONE_EACH, costs=lambda stage: SwitchCost(0.001, 0.0005))
    a, b = pool.join(on_a, job), pool.join(on_b, replace(job, uid="b"))
    await a.hold("generation", 1)
    task = begin(b, "generation", "x")
    on_b.gates["x"] = asyncio.Event()
    on_b.gates["x"].set()
    assert await asyncio.wait_for(task, 10) == ["started", "done"]
    await a.close()
    await b.close()


async def test_a_job_that_has_its_steps_behind_it_holds_nobody_up():
    over: set[Stage] = set()
    pool = GpuPool(Pool(3), Clock())
    on_a, on_b = Stepwise(), Stepwise()
    a = pool.join(
        on_a, PooledJob("a", "default", ONE_EACH, costs=lambda stage: replace(dear(stage), over=stage in over))
    )
    b = pool.join(on_b, PooledJob("b", "default", ONE_EACH, costs=dear))
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
    pool = GpuPool(Pool(gpus), clock)
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

    async def stage(shared: SharedPlatform, name: Stage, part: str) -> None:
        await shared.hold(name, 1)
        assert await begin(shared, name, part) == ["started", "done"]
        await shared.hold(name, 0)

    async def train(uid: str) -> None:
        wanted: dict[Stage, int] = {"generation": 1, "preparation": 0, "learning": 1}
        shared = pool.join(Quick(), PooledJob(uid, "default", wanted, costs=costs))
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
