"""The process that local instances are forked from; see `rlhfless_functions.serving.fork_server`."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

_END_SECONDS = 10.0
_ENVIRONMENT = {
    # Threads that spin while they wait take cores from other processes. On two cores with two other busy processes, a
    # learning step of the quickstart took 20 s and more; 3.4 s with this bound, and 2.0 s without spinning. On idle
    # cores it took 1.2 s, 1.2 s and 2.0 s.
    "GOMP_SPINCOUNT": "5000",
    # A fork of a process with threads would lose them.
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ForkServer:
    """The fork server's process: started before the first fork, and again after it has died.

    Args:
        log_path: file to which it and its children append their logs.
        emulated: whether the instances emulate their GPUs.
        on_report: called with every report but `ready`.
        on_end: called when it has ended, and its children with it.
    """

    def __init__(
        self,
        log_path: Path,
        *,
        emulated: bool,
        on_report: Callable[[dict[str, Any]], Awaitable[None]],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        self._log_path = log_path
        self._emulated = emulated
        self._on_report = on_report
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._lock = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Start it unless it runs, and wait until it has imported everything."""
        await self._ensure()

    async def fork(self, options: Mapping[str, Any]) -> None:
        """Fork an instance.

        Args:
            options: `InstanceOptions` as JSON values.

        Raises:
            ConnectionError: the fork server has died.
        """
        process = await self._ensure()
        assert process.stdin is not None
        process.stdin.write(json.dumps(options).encode() + b"\n")
        await process.stdin.drain()

    async def close(self) -> None:
        """End it and its children."""
        if self._following is not None:
            self._following.cancel()
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()

    async def _ensure(self) -> asyncio.subprocess.Process:
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                self._ready.clear()
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                with self._log_path.open("ab") as log:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-m",
                        "rlhfless_functions.serving.fork_server",
                        str(os.getpid()),
                        *(["--emulated"] if self._emulated else []),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        # Only the driver handles Ctrl-C in a terminal; it then drains its instances.
                        start_new_session=True,
                        env={**os.environ, **_ENVIRONMENT},
                    )
                self._following = asyncio.create_task(self._follow(self._process))
            await self._ready.wait()
            return self._process

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            report = json.loads(line)
            if report["event"] == "ready":
                self._ready.set()
            else:
                await self._on_report(report)
        await process.wait()
        self._ready.set()
        await self._on_end()
