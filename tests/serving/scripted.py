"""A real server on loopback around a function that does what a test says."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from rlhfless_functions.api import (
    ExportRequest,
    ExportResult,
    Message,
    Preload,
    Progress,
    Stage,
    WeightsReference,
    parse_event,
)
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.serving.server import InstanceServer, create_app
from rlhfless_functions.settings import ModelSettings
from tests.jobs import export_request

TOKEN = "the-jobs-own-token"


@dataclass
class Scripted:
    """A function that works until it is released or stopped, then publishes."""

    release: threading.Event = field(default_factory=threading.Event)
    runs: int = 0
    stopped_by: list[str | None] = field(default_factory=list)
    fault: Exception | None = None
    preloaded: list[WeightsReference] = field(default_factory=list)
    unloadable: bool = False
    sleeps: int = 0
    sleep_fault: Exception | None = None
    sleep_ends: threading.Event = field(default_factory=threading.Event)
    stands: threading.Event | None = None
    """What the work hangs on, before it goes on."""

    def preload(self, model: ModelSettings, weights: WeightsReference) -> None:
        if self.unloadable:
            raise TaskError("model_unloadable", f"{weights.uri} has no weights")
        self.preloaded.append(weights)

    def run(self, request: ExportRequest, context: TaskContext) -> Message:
        self.runs += 1
        if self.fault is not None:
            raise self.fault
        context.awake()
        context.emit(Progress(finished=0, running=1, waiting=0, tokens=7))
        if self.stands is not None:
            self.stands.wait()
        while not self.release.is_set() and context.stop_reason is None:
            time.sleep(0.002)
        self.stopped_by.append(context.stop_reason)
        return ExportResult(uri=request.destination)

    def sleep(self) -> None:
        assert threading.current_thread().name.startswith("task"), "never beside a task"
        self.sleeps += 1
        if self.sleep_fault is not None:
            raise self.sleep_fault
        assert self.sleep_ends.wait(60)


def request_for(tmp_path: Path, *, stage: Stage = "learning", part: str = "export", **changes: Any) -> bytes:
    weights = WeightsReference(version=1, uri="w")
    request = export_request(
        part, stage=stage, result=str(tmp_path / f"{part}.json"), heartbeat_seconds=0.05, weights=weights
    )
    return request.model_copy(update=changes).model_dump_json().encode()


@dataclass
class Client:
    session: aiohttp.ClientSession
    url: str
    instance: Instance
    running: "asyncio.Task[None]"

    def run(self, body: bytes, token: str = TOKEN) -> Any:
        return self.session.post(f"{self.url}/v1/run", data=body, headers={"authorization": f"Bearer {token}"})

    def sleep(self, token: str = TOKEN) -> Any:
        return self.session.post(f"{self.url}/v1/sleep", headers={"authorization": f"Bearer {token}"})

    async def refused_sleep(self, token: str = TOKEN) -> tuple[int, str, bool]:
        async with self.sleep(token) as response:
            refusal = parse_event(await response.read())
        return response.status, refusal.reason, refusal.retryable

    async def events(self, body: bytes) -> list[Any]:
        async with self.run(body) as response:
            return [parse_event(line) async for line in response.content]

    async def status(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.url}{path}") as response:
            return response.status, await response.text()


@asynccontextmanager
async def serving(function: Scripted, *, max_request_bytes: int = 10_000, start: bool = True) -> AsyncIterator[Client]:
    instance = Instance("learning", function, name="pod-1", started_at=time.time())
    app = create_app(instance, token=TOKEN, max_request_bytes=max_request_bytes)
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off")
    server = InstanceServer(config, instance, listening.set_result)
    running = asyncio.create_task(server.serve())
    port = await listening
    if start:
        await instance.start(Preload(model=ModelSettings(source="m"), weights=WeightsReference(version=3, uri="w")))
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(session, f"http://127.0.0.1:{port}", instance, running)
    finally:
        function.release.set()
        function.sleep_ends.set()
        server.should_exit = True
        await running
