"""The real functions in this process, on threads: a job takes a second, where processes would start for several.

Requests, events, results, weights and whatever the store holds are those of processes. Only HTTP and the processes'
starts and ends are left out.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from rlhfless_functions.api import STAGES, Event, Failed, Preload, RunRequest, Stage, ends_task, parse_event
from rlhfless_functions.preparation.stage import Preparer
from rlhfless_functions.rewards.scoring import RewardScorer
from rlhfless_functions.runtime.inbox import Inbox
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.serving.instance import create_function
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.base import StateChange, StateListener, TaskFailedError
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.training.driver import drive
from rlhfless_operator.training.run import AvailableGpus


class FunctionsHere:
    """The functions of one job, which forget everything with it.

    Args:
        on_state: told of what becomes of the instances.
        scorer: its reward workers are those of all jobs.
    """

    def __init__(self, on_state: StateListener, scorer: RewardScorer) -> None:
        self._on_state, self._scorer = on_state, scorer
        self._free: dict[Stage, asyncio.Queue[Instance]] = {stage: asyncio.Queue() for stage in STAGES}
        self._instances: list[Instance] = []

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        while count > sum(instance.stage == stage for instance in self._instances):
            # Whoever asks may be told meanwhile to ask no more.
            await asyncio.shield(self._start(stage, preload))

    async def _start(self, stage: Stage, preload: Preload | None) -> None:
        function = create_function(stage, preload.engine if preload is not None else None)
        if isinstance(function, Preparer):
            function._scorer = self._scorer
        instance = Instance(stage, function, name=f"{stage}-{len(self._instances)}", started_at=time.time())
        instance.listening()
        self._instances.append(instance)
        self._tell(instance, "starting")
        await instance.start(preload)
        self._tell(instance, "idle")
        self._free[stage].put_nowait(instance)

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        stage = request.key.stage
        await self.hold(stage, 1)
        instance = await self._free[stage].get()
        self._tell(instance, "busy")
        instance.take()
        inbox, pump = None, None
        if isinstance(request, LiveRequest):
            inbox = Inbox()
            pump = asyncio.create_task(_fill(inbox, request))
        events = instance.stream(request, inbox)
        try:
            async for line in events:
                event = parse_event(line)
                if isinstance(event, Failed) and event.of is None:
                    raise TaskFailedError(event)
                yield event
                if ends_task(event):
                    return
        finally:
            if pump is not None:
                pump.cancel()
            try:
                await events.aclose()  # type: ignore[attr-defined]
            finally:
                # A cut at the moment when the stream ends must not leave others waiting for the instance.
                await asyncio.shield(self._leave(instance))

    async def _leave(self, instance: Instance) -> None:
        # A cut task publishes what it has.
        await asyncio.to_thread(instance._idle.wait)
        self._tell(instance, "idle")
        self._free[instance.stage].put_nowait(instance)

    async def close(self) -> None:
        for instance in self._instances:
            await instance.idle()
            if (close := getattr(instance._function, "close", None)) is not None:
                await asyncio.to_thread(close)
            instance._worker.shutdown(wait=False)
            self._tell(instance, "ended")
        self._instances.clear()

    def _tell(self, instance: Instance, state: Any) -> None:
        self._on_state(StateChange(instance.name, instance.stage, state, time.monotonic()))


async def _fill(inbox: Inbox, request: LiveRequest) -> None:
    async for line in request.lines():
        inbox.put(line)
    inbox.close()


async def train_here(file: Path, root: str, scorer: RewardScorer) -> None:
    """Run a job to its end, with its folder at `root`."""
    job = load_job(file).resolve_paths(file.parent)
    gpus = AvailableGpus(ActorRange(1, 2))
    await drive(job, JobFolder(root), lambda on_state: FunctionsHere(on_state, scorer), LiveProgress(), gpus)
