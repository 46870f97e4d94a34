"""Functions as processes on this machine: started when a stage wants them, ended when it does not."""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rlhfless_functions.api import Done, Event, RunRequest, Stage
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.platforms.base import (
    InstanceLostError,
    InstanceState,
    Preload,
    StateChange,
    StateListener,
    TaskFailedError,
)
from rlhfless_operator.platforms.stream import open_session, run_task

_DRAIN_SECONDS = 10.0
_LEAST_POLL_SECONDS = 0.005
_POLL_SHARE = 0.02
"""Part of the time that something has taken so far until it is asked for again: dozens of instances that load for
seconds would otherwise be kept from it by being asked."""
_MOST_FAILED_STARTS = 3
_ENVIRONMENT = {
    # Threads that spin while they wait take the cores from whoever else works: on two cores with two other busy
    # processes a learning step of the quickstart took 20 s and more, 3.4 s with this bound, and 2.0 s without spinning;
    # on idle cores it is 1.2 s, 1.2 s and 2.0 s.
    "GOMP_SPINCOUNT": "5000",
    # A fork of a process with threads would lose them.
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class _Process:
    """One instance."""

    name: str
    stage: Stage
    state: InstanceState = "starting"
    pid: int | None = None
    port: int | None = None
    idle_since: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def wanted(self) -> bool:
        return self.state in ("starting", "idle", "busy")


class LocalPlatform:
    """Function instances as processes on loopback, forked from one template process that has imported everything.

    Args:
        keep_alive: seconds that a surplus idle instance of each stage is kept.
        threads: threads of torch's CPU operators in an instance of each stage.
        log_path: file that the instances' logs are appended to.
        on_state: told of every change of an instance's state.
        stall_seconds: longest silence of a stream.
        emulation: the GPUs that the instances emulate, in a rehearsal.
    """

    def __init__(
        self,
        *,
        keep_alive: Mapping[Stage, float],
        threads: Mapping[Stage, int],
        log_path: Path,
        on_state: StateListener,
        stall_seconds: float = 120.0,
        emulation: EmulationSettings | None = None,
    ) -> None:
        self._keep_alive = keep_alive
        self._threads = threads
        self._log_path = log_path
        self._on_state = on_state
        self._stall_seconds = stall_seconds
        self._emulation = emulation
        self._token = secrets.token_urlsafe(32)
        self._targets: dict[Stage, int] = {}
        self._preloads: dict[Stage, Preload | None] = {}
        self._processes: dict[str, _Process] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Condition()
        self._template: asyncio.subprocess.Process | None = None
        self._template_ready = asyncio.Event()
        self._template_lock = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_starts: dict[Stage, int] = {}
        self._release_timers: dict[Stage, asyncio.TimerHandle] = {}

    # --- what the training loop calls ---

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """Want `count` instances of a stage from now on."""
        self._targets[stage] = count
        self._preloads[stage] = preload
        for _ in range(count - len(self._wanted(stage))):
            self._start(stage)
        self._release_surplus(stage)

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """Carry a task to a free instance of its stage; see `Platform.run`."""
        process = await self._acquire(request.key.stage)
        session = self._session = self._session or open_session()
        events = run_task(session, process.url, self._token, request, stall_seconds=self._stall_seconds)
        finished = False
        try:
            async for event in events:
                finished = isinstance(event, Done)
                yield event
        except TaskFailedError as error:
            finished = True
            if error.reason == "engine_lost":
                self._kill(process)
            raise
        except InstanceLostError:
            self._kill(process)
            raise
        finally:
            try:
                await events.aclose()
            finally:
                # Whoever is cut while a stream ends by itself must not leave the others waiting for its instance.
                await asyncio.shield(self._leave(process, finished=finished))

    async def close(self) -> None:
        """End every instance and the template."""
        for process in list(self._processes.values()):
            self._drain(process)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                for process in list(self._processes.values()):
                    await process.ended.wait()
        for task in list(self._tasks):
            task.cancel()
        if self._template is not None and self._template.returncode is None:
            assert self._template.stdin is not None
            self._template.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    await self._template.wait()
            if self._template.returncode is None:
                self._template.kill()
                await self._template.wait()
        for process in list(self._processes.values()):
            self._ended(process)
        if self._session is not None:
            await self._session.close()

    # --- instances ---

    def _wanted(self, stage: Stage) -> list[_Process]:
        return [process for process in self._processes.values() if process.stage == stage and process.wanted]

    async def _acquire(self, stage: Stage) -> _Process:
        while True:
            idle = [process for process in self._wanted(stage) if process.state == "idle"]
            if idle:
                process = min(idle, key=lambda candidate: candidate.idle_since)
                self._enter(process, "busy")
                return process
            if self._failed_starts.get(stage, 0) >= _MOST_FAILED_STARTS:
                raise InstanceLostError(f"{stage} instances end before they are ready; see {self._log_path}")
            if len(self._wanted(stage)) < max(1, self._targets.get(stage, 0)):
                self._start(stage)
            async with self._changed:
                await self._changed.wait()

    async def _leave(self, process: _Process, *, finished: bool) -> None:
        """A task's stream is closed: the instance is free as soon as it has published what it had."""
        if not finished and process.state == "busy":
            await self._published(process)
        if process.state == "busy":
            self._enter(process, "idle")
            self._release_surplus(process.stage)
        async with self._changed:
            self._changed.notify_all()

    def _start(self, stage: Stage) -> None:
        process = _Process(name=f"{stage}-{next(self._numbers)}", stage=stage)
        self._processes[process.name] = process
        self._enter(process, "starting")
        self._spawn(self._bring_up(process))

    async def _bring_up(self, process: _Process) -> None:
        preload = self._preloads.get(process.stage)
        options = {
            "stage": process.stage,
            "name": process.name,
            "token": self._token,
            "threads": self._threads.get(process.stage, 1),
            "started_at": time.time(),
            "model": preload.model.model_dump(mode="json") if preload else None,
            "weights": preload.weights.model_dump(mode="json") if preload else None,
            "engine": preload.engine.model_dump(mode="json") if preload and preload.engine else None,
            "emulation": self._emulation.model_dump(mode="json") if self._emulation else None,
        }
        template = await self._ensure_template()
        assert template.stdin is not None
        try:
            template.stdin.write(json.dumps(options).encode() + b"\n")
            await template.stdin.drain()
        except ConnectionError:
            self._ended(process)

    async def _become_ready(self, process: _Process) -> None:
        session = self._session = self._session or open_session()
        since = time.monotonic()
        while process.state == "starting":
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                async with session.get(f"{process.url}/readyz") as response:
                    if response.status == 200:
                        self._failed_starts[process.stage] = 0
                        self._enter(process, "idle")
                        self._release_surplus(process.stage)
                        break
            await asyncio.sleep(_poll_seconds(since))
        async with self._changed:
            self._changed.notify_all()

    async def _published(self, process: _Process) -> None:
        """Wait until a task that was cut has published what it had; an instance that can't is ended."""
        session = self._session = self._session or open_session()
        since = time.monotonic()
        try:
            async with asyncio.timeout(self._stall_seconds):
                while process.state == "busy":
                    async with session.get(f"{process.url}/readyz") as response:
                        if not (await response.json())["busy"]:
                            return
                    await asyncio.sleep(_poll_seconds(since))
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            self._kill(process)

    def _release_surplus(self, stage: Stage) -> None:
        if timer := self._release_timers.pop(stage, None):
            timer.cancel()
        keep_alive = self._keep_alive.get(stage, 0.0)
        surplus = len(self._wanted(stage)) - self._targets.get(stage, 0)
        idle = sorted(
            (process for process in self._wanted(stage) if process.state == "idle"), key=lambda each: each.idle_since
        )
        for process in idle[: max(0, surplus)]:
            remaining = process.idle_since + keep_alive - time.monotonic()
            if remaining <= 0:
                self._drain(process)
            else:
                loop = asyncio.get_running_loop()
                self._release_timers[stage] = loop.call_later(remaining, self._release_surplus, stage)
                return

    def _drain(self, process: _Process) -> None:
        if process.state in ("draining", "ended"):
            return
        self._enter(process, "draining")
        if process.pid is not None:
            _signal(process.pid, signal.SIGTERM)
            self._spawn(self._kill_later(process))

    async def _kill_later(self, process: _Process) -> None:
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                await process.ended.wait()
        except TimeoutError:
            self._kill(process)

    def _kill(self, process: _Process) -> None:
        if process.pid is not None:
            _signal(process.pid, signal.SIGKILL)
        self._ended(process)

    def _ended(self, process: _Process) -> None:
        if process.state != "ended":
            self._enter(process, "ended")
            process.ended.set()
            self._processes.pop(process.name, None)

    def _enter(self, process: _Process, state: InstanceState) -> None:
        process.state = state
        now = time.monotonic()
        if state == "idle":
            process.idle_since = now
        self._on_state(StateChange(process.name, process.stage, state, now))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the template process ---

    async def _ensure_template(self) -> asyncio.subprocess.Process:
        async with self._template_lock:
            if self._template is None or self._template.returncode is not None:
                self._template_ready.clear()
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                with self._log_path.open("ab") as log:
                    self._template = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-m",
                        "rlhfless_functions.template",
                        str(os.getpid()),
                        *(["--emulated"] if self._emulation else []),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        # Ctrl-C in a terminal is for the driver alone, which then drains its instances.
                        start_new_session=True,
                        env={**os.environ, **_ENVIRONMENT},
                    )
                self._spawn(self._follow(self._template))
            await self._template_ready.wait()
            return self._template

    async def _follow(self, template: asyncio.subprocess.Process) -> None:
        assert template.stdout is not None
        while line := await template.stdout.readline():
            report = json.loads(line)
            if report["event"] == "ready":
                self._template_ready.set()
                continue
            process = self._processes.get(report["name"])
            if process is None:
                if report["event"] == "listening":
                    _signal(report["pid"], signal.SIGKILL)
                continue
            if report["event"] == "listening":
                process.pid, process.port = report["pid"], report["port"]
                if process.state == "draining":
                    _signal(report["pid"], signal.SIGTERM)
                else:
                    self._spawn(self._become_ready(process))
            else:
                if process.state == "starting":
                    # Without a preload the first request itself meets the fault, and its answer names it.
                    self._preloads[process.stage] = None
                    self._failed_starts[process.stage] = self._failed_starts.get(process.stage, 0) + 1
                self._ended(process)
                async with self._changed:
                    self._changed.notify_all()
        await template.wait()
        # Its children died with it.
        self._template_ready.set()
        for process in list(self._processes.values()):
            if process.state == "starting":
                self._failed_starts[process.stage] = self._failed_starts.get(process.stage, 0) + 1
            self._ended(process)
        async with self._changed:
            self._changed.notify_all()


def _poll_seconds(since: float) -> float:
    return max(_LEAST_POLL_SECONDS, _POLL_SHARE * (time.monotonic() - since))


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
