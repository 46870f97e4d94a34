"""Pods of an emulated Knative that run a rehearsal's functions: each is a process with an emulated GPU."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.platforms.local.fork_server import ForkServer
from rlhfless_operator.platforms.pods.manifests import PORT
from tests.clusters.running_functions import Launch, RunningFunction


class _Process:
    def __init__(self) -> None:
        self.listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its id, once it listens."""
        self.ended = asyncio.Event()

    async def end(self, number: signal.Signals) -> None:
        if not self.ended.is_set():
            os.kill(self.listens.result(), number)
            await self.ended.wait()


@asynccontextmanager
async def rehearsing_functions(log: Path) -> AsyncIterator[Launch]:
    """Starts a pod's function in a process of its own, at an address of its own; all end with the context."""
    processes: dict[str, _Process] = {}
    numbers = itertools.count(1)

    async def heard(report: dict[str, Any]) -> None:
        process = processes[report["name"]]
        if report["event"] == "listening":
            process.listens.set_result(report["pid"])
            return
        process.ended.set()
        if not process.listens.done():
            process.listens.set_exception(RuntimeError(f"{report['name']} ended before it listened; see {log}"))

    async def all_ended() -> None:
        for process in processes.values():
            process.ended.set()

    async def launch(name: str, environment: Mapping[str, str]) -> RunningFunction:
        number = next(numbers)
        host = f"127.77.{number // 250}.{number % 250 + 1}"
        process = processes[name] = _Process()
        emulation = EmulationSettings.model_validate_json(environment["RLHFLESS_EMULATION"])
        options = {
            "stage": environment["RLHFLESS_STAGE"],
            "name": name,
            "token": environment["RLHFLESS_TOKEN"],
            "host": host,
            "port": PORT,
            "emulation": emulation.model_dump(mode="json"),
            "started_at": time.time(),
        }
        await forks.fork(options)
        await process.listens
        return RunningFunction(host, PORT, lambda: process.end(signal.SIGTERM), lambda: process.end(signal.SIGKILL))

    forks = ForkServer(log, emulated=True, on_report=heard, on_end=all_ended)
    try:
        yield launch
    finally:
        await forks.close()
