"""A platform that opens another platform when it is first needed, and measures it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from rlhfless_functions.api import Done, Event, GenerationRequest, RunRequest, Samples, Stage, Started
from rlhfless_operator.controller.context import ClusterPlatform
from rlhfless_operator.controller.metrics import JobMeter
from rlhfless_operator.platforms.base import Preload


class MeteredPlatform:
    """Forwards everything to another platform.

    Args:
        platform: the other platform.
        meter: records what happens.
        on_ready: called once the platform is open.
    """

    def __init__(self, platform: ClusterPlatform, meter: JobMeter, on_ready: Callable[[], None]) -> None:
        self._platform = platform
        self._meter = meter
        self._on_ready = on_ready
        self._opening = asyncio.Lock()
        self._is_open = False
        self._running = 0
        self._last: tuple[Stage, float] | None = None

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """As the platform does."""
        await self._open()
        await self._platform.hold(stage, count, preload)

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """As the platform does."""
        await self._open()
        began = self._begins(request.key.stage)
        try:
            async with aclosing(self._platform.run(request)) as events:
                async for event in events:
                    if isinstance(event, Started) and event.cold_start is None and began is not None:
                        self._meter.metrics.control.observe(time.monotonic() - began)
                    if isinstance(event, Samples | Done):
                        self._meter.moved()
                    if isinstance(event, Samples) and isinstance(request, GenerationRequest):
                        self._took(request, event)
                    yield event
        finally:
            self._running -= 1
            self._last = (request.key.stage, time.monotonic())

    async def close(self) -> None:
        """As the platform does."""
        await self._platform.close()

    async def _open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._platform.open()
                self._is_open = True
                self._on_ready()

    def _begins(self, stage: Stage) -> float | None:
        """Count a new request. For the first one after another stage, return the time when that stage ended."""
        first = self._running == 0 and self._last is not None and self._last[0] != stage
        self._running += 1
        return self._last[1] if first and self._last is not None else None

    def _took(self, request: GenerationRequest, event: Samples) -> None:
        if request.purpose == "training":
            lengths = self._meter.lengths.setdefault(request.key.step, [])
            lengths += [sample.tokens for sample in event.samples]
