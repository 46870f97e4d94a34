"""Jobs of a pool whose platform notes what it is asked for, and whose tasks end when the test says so."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from rlhfless_functions.api import (
    Done,
    Event,
    Preload,
    RunRequest,
    Stage,
    Started,
)
from rlhfless_operator.planner.pools.sharing import Pool
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.platforms.turns.whole_gpus import Waits, WholeGpuPool, WholeGpus
from tests.jobs import export_request

ONE_EACH: dict[Stage, int] = {"generation": 1, "preparation": 1, "learning": 1}


class Stepwise:
    """A platform that notes what it is asked for, and whose tasks wait to be let go on."""

    def __init__(self) -> None:
        self.held: dict[Stage, int] = {}
        self.running: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.closed = False

    async def open(self) -> None:
        """There is nothing to create."""

    async def remove(self) -> None:
        """There is nothing to remove."""

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


class PoolUnderTest:
    """A pool, and the platforms of its jobs."""

    def __init__(self, gpus: int, clock: Clock | None = None) -> None:
        self.jobs: list[PoolMember] = []
        self.clock: Callable[[], float] = clock or time.monotonic
        self.pool = WholeGpuPool(Pool(gpus), self.jobs, self.clock)

    async def join(
        self,
        uid: str,
        platform: "Stepwise | None" = None,
        *,
        gpus: Mapping[Stage, int] = ONE_EACH,
        on_wait: Waits = lambda waiting: None,
        **given: Any,
    ) -> "tuple[JobPlatform, Stepwise]":
        """An open platform of a job of the pool."""
        member = PoolMember(uid, "default", uid, gpus, "pool", self.jobs, clock=self.clock, **given)
        self.jobs.append(member)
        platform = platform or Stepwise()
        job = JobPlatform(platform, member, WholeGpus(self.pool, member, on_wait))
        await job.open()
        return job, platform


def begin(platform: JobPlatform, stage: Stage, part: str) -> "asyncio.Task[list[str]]":
    async def run() -> list[str]:
        return [event.event async for event in platform.run(export_request(part, stage=stage))]

    return asyncio.create_task(run())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
