"""The hook that measures what happens on a job's platform."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rlhfless_functions.api import Done, Event, GenerationRequest, RunRequest, Samples, Stage, Started
from rlhfless_operator.controller.prometheus import JobMeter
from rlhfless_operator.platforms.job_platform import ClusterPlatform, Hook, Listener


class Metering(Hook):
    """Records what happens on a platform.

    Args:
        meter: the job's metrics.
        on_ready: called once the platform is open.
    """

    def __init__(self, meter: JobMeter, on_ready: Callable[[], None]) -> None:
        self._meter = meter
        self._on_ready = on_ready
        self._running = 0
        self._last: tuple[Stage, float] | None = None

    @asynccontextmanager
    async def opening(self, platform: ClusterPlatform) -> AsyncIterator[None]:
        """Report that the platform is open."""
        yield
        self._on_ready()

    @asynccontextmanager
    async def task(self, request: RunRequest) -> AsyncIterator[Listener]:
        """Measure a task."""
        began = self._begins(request.key.stage)

        def listen(event: Event) -> None:
            if isinstance(event, Started) and event.cold_start is None and began is not None:
                self._meter.metrics.control.observe(time.monotonic() - began)
            if isinstance(event, Samples | Done):
                self._meter.moved()
            if isinstance(event, Samples) and isinstance(request, GenerationRequest):
                self._took(request, event)

        try:
            yield listen
        finally:
            self._running -= 1
            self._last = (request.key.stage, time.monotonic())

    def _begins(self, stage: Stage) -> float | None:
        """Count a new request. For the first one after another stage, return the time when that stage ended."""
        first = self._running == 0 and self._last is not None and self._last[0] != stage
        self._running += 1
        return self._last[1] if first and self._last is not None else None

    def _took(self, request: GenerationRequest, event: Samples) -> None:
        if request.purpose == "training":
            lengths = self._meter.lengths.setdefault(request.key.step, [])
            lengths += [sample.tokens for sample in event.samples]
