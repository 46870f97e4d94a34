"""Jobs of a pool whose platform notes what it is asked for, and whose tasks end when the test says so."""

import asyncio
from collections.abc import AsyncGenerator

from rlhfless_functions.api import (
    Done,
    Event,
    RunRequest,
    Stage,
    Started,
)
from rlhfless_operator.platforms.base import Preload
from rlhfless_operator.platforms.shared import GpuPool, PooledJob, SharedPlatform
from tests.jobs import export_request

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


def begin(platform: SharedPlatform, stage: Stage, part: str) -> "asyncio.Task[list[str]]":
    async def run() -> list[str]:
        return [event.event async for event in platform.run(export_request(part, stage=stage))]

    return asyncio.create_task(run())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
