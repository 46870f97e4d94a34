"""Several jobs on one pool of GPUs: a platform that asks the pool before it starts an instance or sends a task."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from rlhfless_functions.api import STAGES, Event, RunRequest, Stage
from rlhfless_operator.planner.sharing import Claim, Pool, check_feasible, share
from rlhfless_operator.planner.usage import RecentUse
from rlhfless_operator.platforms.base import Platform, Preload

Clock = Callable[[], float]


class GpuPool:
    """One pool of GPUs and the jobs on it.

    Args:
        pool: its size and the namespaces' quotas.
        clock: monotonic seconds.
    """

    def __init__(self, pool: Pool, clock: Clock = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._jobs: dict[str, SharedPlatform] = {}

    def join(
        self,
        platform: Platform,
        *,
        job: str,
        namespace: str,
        priority: int,
        gpus: Mapping[Stage, int],
        keep_alive: Mapping[Stage, float],
    ) -> "SharedPlatform":
        """Let a job in.

        Args:
            platform: where the functions run. It keeps no instance of its own accord: that is the pool's business.
            job: its unique id.
            gpus: GPUs of an instance of each stage.
            keep_alive: seconds that an instance without work is kept, as long as the pool allows it.

        Raises:
            ValueError: an instance of it is larger than the pool, or than its namespace's quota.
        """
        for stage, count in gpus.items():
            check_feasible(Claim(job, stage, namespace, count, working=0, wanted=1), self._pool)
        joined = SharedPlatform(self, platform, job, namespace, priority, gpus, keep_alive, self._clock)
        self._jobs[job] = joined
        return joined

    def leave(self, job: str) -> None:
        """Let a job go; its part is the others'."""
        if self._jobs.pop(job, None) is not None:
            self.divide()

    def divide(self) -> None:
        """Divide the pool anew; every job hears of what changed for it."""
        grants = share([claim for job in self._jobs.values() for claim in job.claims()], self._pool)
        for job in self._jobs.values():
            job.granted({stage: count for (owner, stage), count in grants.items() if owner == job.name})


class SharedPlatform:
    """A job's platform as the pool allows it. Made by `GpuPool.join`."""

    def __init__(
        self,
        pool: GpuPool,
        platform: Platform,
        job: str,
        namespace: str,
        priority: int,
        gpus: Mapping[Stage, int],
        keep_alive: Mapping[Stage, float],
        clock: Clock,
    ) -> None:
        self.name = job
        self._pool = pool
        self._platform = platform
        self._namespace = namespace
        self._priority = priority
        self._gpus = gpus
        self._keep_alive = keep_alive
        self._clock = clock
        self._held: dict[Stage, deque[tuple[float, int]]] = {}
        self._preloads: dict[Stage, Preload | None] = {}
        self._running: Counter[Stage] = Counter()
        self._waiting: Counter[Stage] = Counter()
        self._granted: dict[Stage, int] = {}
        self._applied: dict[Stage, int] = {}
        self._changed = asyncio.Event()
        self._applying = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._use = RecentUse(clock())
        self._used = 0.0

    # --- what the training loop calls ---

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """Want `count` instances; as many are held as the pool allows."""
        holds = self._held.setdefault(stage, deque())
        if holds:
            # The one before counts until now.
            holds.append((self._clock(), holds.pop()[1]))
        holds.append((self._clock(), count))
        self._preloads[stage] = preload
        self._applied.pop(stage, None)
        self._pool.divide()
        if keep_alive := self._keep_alive.get(stage, 0.0):
            loop = asyncio.get_running_loop()
            self._timers = [timer for timer in self._timers if timer.when() > loop.time()]
            self._timers.append(loop.call_later(keep_alive, self._pool.divide))
        await self._apply()

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """Carry a task to an instance as soon as the pool allows one more."""
        stage = request.key.stage
        await self._admit(stage)
        try:
            async with aclosing(self._platform.run(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._charge()
            self._running[stage] -= 1
            self._pool.divide()

    async def close(self) -> None:
        """End every instance and leave the pool."""
        for timer in self._timers:
            timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        try:
            await self._platform.close()
        finally:
            self._pool.leave(self.name)

    # --- what the pool calls ---

    def claims(self) -> list[Claim]:
        """What the job asks of the pool now."""
        self._charge()
        return [self._claim(stage) for stage in {*self._held, *self._waiting, *self._running}]

    def granted(self, grants: Mapping[str, int]) -> None:
        """The pool was divided anew."""
        self._granted = {stage: grants[stage] for stage in STAGES if stage in grants}
        self._changed.set()
        if any(self._applied.get(stage) != count for stage, count in self._granted.items()):
            self._spawn(self._apply())

    def _claim(self, stage: Stage) -> Claim:
        wanted = self._running[stage] + self._waiting[stage]
        holds = self._held.get(stage, deque())
        oldest = self._clock() - self._keep_alive.get(stage, 0.0)
        while len(holds) > 1 and holds[0][0] <= oldest:
            holds.popleft()
        return Claim(
            job=self.name,
            stage=stage,
            namespace=self._namespace,
            gpus=self._gpus.get(stage, 0),
            working=self._running[stage],
            wanted=wanted,
            kept=max(0, max((count for _, count in holds), default=0) - wanted),
            priority=self._priority,
            used=self._used,
        )

    async def _admit(self, stage: Stage) -> None:
        admitted = False
        self._waiting[stage] += 1
        try:
            self._pool.divide()
            while self._running[stage] >= self._granted.get(stage, 0):
                self._changed.clear()
                await self._changed.wait()
            self._charge()
            self._running[stage] += 1
            admitted = True
        finally:
            self._waiting[stage] -= 1
            if not admitted:
                self._pool.divide()

    async def _apply(self) -> None:
        async with self._applying:
            for stage, count in list(self._granted.items()):
                if self._applied.get(stage) != count:
                    self._applied[stage] = count
                    await self._platform.hold(stage, count, self._preloads.get(stage))

    def _charge(self) -> None:
        gpus = sum(count * self._gpus.get(stage, 0) for stage, count in self._running.items())
        self._used = self._use.charge(gpus, self._clock())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
