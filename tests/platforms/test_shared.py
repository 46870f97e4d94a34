"""Several jobs on one pool of GPUs: who may run what, with a platform whose tasks end when the test says so."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from rlhfless_functions.api import Done, Event, ExportRequest, RunRequest, Stage, Started, TaskKey, WeightsReference
from rlhfless_functions.settings import ModelSettings
from rlhfless_operator.planner.sharing import Pool
from rlhfless_operator.platforms.base import Preload
from rlhfless_operator.platforms.shared import GpuPool, SharedPlatform

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
    options = {"job": job, "namespace": "default", "priority": priority, "gpus": gpus, "keep_alive": keep_alive or {}}
    return pool.join(platform, **options), platform


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
