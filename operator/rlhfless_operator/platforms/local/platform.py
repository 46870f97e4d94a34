"""Functions as processes on this machine, which start and end with a stage's demand."""

import asyncio
import contextlib
import itertools
import secrets
import signal
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp

from rlhfless_functions.api import Event, Preload, RunRequest, Stage, ends_task
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.planner.pools.turns import take_turns
from rlhfless_operator.platforms.base import (
    InstanceLostError,
    InstanceState,
    StateChange,
    StateListener,
    TaskFailedError,
    takes_spare_slots,
)
from rlhfless_operator.platforms.local.fork_server import ForkServer
from rlhfless_operator.platforms.local.gpus import GpuAccount
from rlhfless_operator.platforms.local.process import LocalProcess, instance_options
from rlhfless_operator.platforms.local.turns import UnplacedTask, longest_asleep, look
from rlhfless_operator.platforms.stream import open_session, run_task, shows_work

_DRAIN_SECONDS = 10.0
_MOST_FAILED_STARTS = 3


class LocalPlatform:
    """Function instances as processes on loopback, forked from a fork server that has imported everything.

    On a machine with GPUs, an instance has GPUs of its own while it works. If another stage's task waits for them, an
    idle instance releases them and sleeps: its process stays, and takes them again for its next task.

    Args:
        keep_alive: seconds that a surplus idle instance of each stage is kept.
        threads: threads of torch's CPU operators in an instance of each stage.
        log_path: file to which the instances append their logs.
        on_state: called with every change of an instance's state.
        stall_seconds: longest silence of a stream.
        emulation: the GPUs that the instances emulate, in a rehearsal.
        gpus: names of the GPUs to use, as in CUDA_VISIBLE_DEVICES.
        gpus_per_instance: number of GPUs of an instance of each stage; instances of missing stages see none.
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
        gpus: Sequence[str] = (),
        gpus_per_instance: Mapping[Stage, int] | None = None,
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
        self._processes: dict[str, LocalProcess] = {}
        self._numbers = itertools.count(1)
        self._gpus = GpuAccount(gpus, gpus_per_instance or {})
        self._waiting: dict[int, UnplacedTask] = {}
        """Tasks without an instance, in their order."""
        self._numbers_of_tasks = itertools.count(1)
        self._fork_server = ForkServer(
            log_path, emulated=emulation is not None, on_report=self._heard, on_end=self._template_ended
        )
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_starts: dict[Stage, int] = {}
        self._release_timers: dict[Stage, asyncio.TimerHandle] = {}

    # --- what the training loop calls ---

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """Set the wanted number of instances of a stage."""
        self._targets[stage] = count
        self._preloads[stage] = preload
        self._start_ahead(stage)
        self._release_surplus(stage)

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """Send a task to a free instance of its stage; see `Platform.run`."""
        while True:
            process = await self._acquire(request)
            try:
                async with aclosing(self._carry(process, request)) as events:
                    async for event in events:
                        yield event
                return
            except TaskFailedError as error:
                # A cut request may reach an instance just after the instance has reported that it is free.
                if error.reason != "busy":
                    raise

    async def _carry(self, process: LocalProcess, request: RunRequest) -> AsyncGenerator[Event, None]:
        events = run_task(self._open_session(), process.url, self._token, request, stall_seconds=self._stall_seconds)
        finished = False
        try:
            async for event in events:
                finished = ends_task(event)
                if process.state == "switching" and shows_work(event):
                    self._enter(process, "busy")
                yield event
        except TaskFailedError as error:
            finished = error.reason != "busy"
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
                # A cut at the moment when the stream ends must not leave others waiting for the instance.
                await asyncio.shield(self._leave(process, finished=finished))

    async def close(self) -> None:
        """End every instance and the fork server."""
        self._targets.clear()
        for process in list(self._processes.values()):
            self._drain(process)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                for process in list(self._processes.values()):
                    await process.ended.wait()
        for task in list(self._tasks):
            task.cancel()
        await self._fork_server.close()
        for process in list(self._processes.values()):
            self._ended(process)
        if self._session is not None:
            await self._session.close()

    # --- instances ---

    def _kept(self, stage: Stage) -> list[LocalProcess]:
        return [process for process in self._processes.values() if process.stage == stage and process.kept]

    async def _acquire(self, request: RunRequest) -> LocalProcess:
        turn: asyncio.Future[LocalProcess] = asyncio.get_running_loop().create_future()
        number, part = next(self._numbers_of_tasks), (request.key.step, request.key.part)
        self._waiting[number] = UnplacedTask(request.key.stage, part, turn, takes_spare_slots(request))
        try:
            self._take_turns()
            process = await turn
            process.last_part = part
            return process
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # Its turn had come at the same moment.
                self._give_back(turn.result())
            raise
        finally:
            self._waiting.pop(number, None)

    def _give_back(self, process: LocalProcess) -> None:
        """Take back an instance that was chosen for a task which is gone."""
        if process.state == "switching":
            self._gpus.sleep(process.name)
            self._enter(process, "asleep")
        elif process.state == "busy":
            self._enter(process, "idle")
        self._release_surplus(process.stage)
        self._tell()

    def _take_turns(self) -> None:
        """Assign instances to waiting tasks, put instances to sleep that are in the way, and start missing ones."""
        started = True
        while started:
            # A cut task stays in the list until it has noticed.
            waiting = {number: each for number, each in self._waiting.items() if not each.turn.done()}
            tasks, use = look(waiting, list(self._processes.values()), self._gpus, self._most)
            turns = take_turns(tasks, use)
            started = False
            for number, name in turns.granted.items():
                if (process := self._processes.get(name)) is not None:
                    self._gpus.wake(name)
                    self._enter(process, "switching" if process.asleep else "busy")
                    waiting.pop(number).turn.set_result(process)
                else:
                    # Its turn comes when the instance is ready. Another task may need one too.
                    started = True
                    self._start_for(waiting[number].stage, use.homes[name])
            for name in turns.sleeps:
                self._processes[name].falling_asleep = True
                self._enter(self._processes[name], "switching")
                self._spawn(self._sleep(self._processes[name]))
        for each in waiting.values():
            if self._never_ready(each.stage):
                problem = f"{each.stage} instances end before they are ready; see {self._log_path}"
                each.turn.set_exception(InstanceLostError(problem))

    def _most(self, stage: Stage) -> int:
        """Return the most instances of a stage that may work for waiting tasks."""
        return 0 if self._never_ready(stage) else max(1, self._targets.get(stage, 0))

    def _never_ready(self, stage: Stage) -> bool:
        """Return whether too many instances of a stage have ended before they were ready."""
        return self._failed_starts.get(stage, 0) >= _MOST_FAILED_STARTS

    def _start_for(self, stage: Stage, home: Sequence[str]) -> None:
        """Start an instance for a waiting task. It replaces a sleeping one whose GPUs stay busy for longer."""
        self._start(stage, home)
        if len(kept := self._kept(stage)) > self._most(stage):
            for process in longest_asleep(kept, self._processes, self._gpus)[:1]:
                self._drain(process)

    async def _sleep(self, process: LocalProcess) -> None:
        """Make an idle instance release its GPUs, or end it if it can't."""
        slept = await process.sleep(self._open_session(), self._token, self._stall_seconds)
        process.falling_asleep = False
        if not slept:
            self._kill(process)
        elif not process.terminated:
            self._gpus.sleep(process.name)
            self._enter(process, "asleep")
            self._release_surplus(process.stage)
        self._tell()

    def _open_session(self) -> aiohttp.ClientSession:
        self._session = self._session or open_session()
        return self._session

    async def _leave(self, process: LocalProcess, *, finished: bool) -> None:
        """Free the instance of a task whose stream is closed, as soon as it has published its partial results."""
        if not finished and process.has_task:
            published = await process.publish(self._open_session(), self._stall_seconds)
            if not published:
                self._kill(process)
        if process.has_task:
            self._enter(process, "idle")
            self._release_surplus(process.stage)
        self._tell()

    def _tell(self) -> None:
        """Give turns to waiting tasks after a change. If none waits, start wanted instances on free GPUs."""
        if self._waiting:
            self._take_turns()
        elif self._gpus.any:
            for stage in self._targets:
                if not self._failed_starts.get(stage):
                    self._start_ahead(stage)

    def _start_ahead(self, stage: Stage) -> None:
        """Start the wanted instances for which GPUs are free."""
        while len(self._kept(stage)) < self._targets[stage] and self._gpus.has_room(stage):
            self._start(stage, self._gpus.home_of_fresh(stage) or ())

    def _start(self, stage: Stage, home: Sequence[str]) -> None:
        """Start an instance on GPUs that are free."""
        name = f"{stage}-{next(self._numbers)}"
        self._gpus.settle(name, home)
        process = self._processes[name] = LocalProcess(name=name, stage=stage)
        self._spawn(self._bring_up(process))

    async def _bring_up(self, process: LocalProcess) -> None:
        # The fork server imports everything once. This time is not part of an instance's start-up, which prices
        # releases.
        await self._fork_server.ready()
        if process.terminated or process.state != "starting":
            self._ended(process)
            return
        process.begun = True
        self._enter(process, "starting")
        options = instance_options(
            process,
            self._preloads.get(process.stage),
            token=self._token,
            threads=self._threads.get(process.stage, 1),
            emulation=self._emulation,
            gpus=self._gpus.of(process.name) if self._gpus.any else None,
        )
        try:
            await self._fork_server.fork(options)
        except ConnectionError:
            self._ended(process)

    async def _become_ready(self, process: LocalProcess) -> None:
        await process.become_ready(self._open_session())
        if process.state == "starting":
            self._failed_starts[process.stage] = 0
            self._enter(process, "idle")
            self._release_surplus(process.stage)
        self._tell()

    def _release_surplus(self, stage: Stage) -> None:
        if timer := self._release_timers.pop(stage, None):
            timer.cancel()
        keep_alive = self._keep_alive.get(stage, 0.0)
        surplus = len(self._kept(stage)) - self._targets.get(stage, 0)
        # Among idle instances, the sleeping ones have the most to load.
        without_work = [process for process in self._kept(stage) if process.asleep or process.state == "idle"]
        without_work.sort(key=lambda process: (not process.asleep, process.idle_since))
        remaining = []
        for process in without_work[: max(0, surplus)]:
            left = process.idle_since + keep_alive - time.monotonic()
            if left <= 0:
                self._drain(process)
            else:
                remaining.append(left)
        if remaining:
            loop = asyncio.get_running_loop()
            self._release_timers[stage] = loop.call_later(min(remaining), self._release_surplus, stage)

    def _drain(self, process: LocalProcess) -> None:
        if process.terminated:
            return
        process.terminated = True
        # A sleeping instance has nothing to release, and costs nothing until it is gone.
        if process.begun and process.state != "asleep":
            self._enter(process, "draining")
        if process.pid is not None:
            process.signal(signal.SIGTERM)
            self._spawn(self._kill_later(process))

    async def _kill_later(self, process: LocalProcess) -> None:
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                await process.ended.wait()
        except TimeoutError:
            self._kill(process)

    def _kill(self, process: LocalProcess) -> None:
        process.signal(signal.SIGKILL)
        self._ended(process)

    def _ended(self, process: LocalProcess) -> None:
        if self._processes.pop(process.name, None) is None:
            return
        self._gpus.leave(process.name)
        if process.state != "ended":
            self._enter(process, "ended")
        process.ended.set()

    def _enter(self, process: LocalProcess, state: InstanceState) -> None:
        process.state = state
        now = time.monotonic()
        if state == "idle":
            process.idle_since = now
        self._on_state(StateChange(process.name, process.stage, state, now))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the fork server ---

    async def _heard(self, report: dict[str, Any]) -> None:
        """Handle the fork server's report that an instance listens or has ended."""
        process = self._processes.get(report["name"])
        if process is None:
            if report["event"] == "listening":
                # It was released before it had started.
                LocalProcess(report["name"], "generation", pid=report["pid"]).signal(signal.SIGKILL)
        elif report["event"] == "listening":
            process.pid, process.port = report["pid"], report["port"]
            if process.terminated:
                process.signal(signal.SIGTERM)
            else:
                self._spawn(self._become_ready(process))
        else:
            if process.state == "starting":
                # Without a preload, the first request fails instead, and its answer names the cause.
                self._preloads[process.stage] = None
                self._failed_starts[process.stage] = self._failed_starts.get(process.stage, 0) + 1
            self._ended(process)
            self._tell()

    async def _template_ended(self) -> None:
        """Handle the end of the fork server: its children have ended with it."""
        for process in list(self._processes.values()):
            if process.state == "starting":
                self._failed_starts[process.stage] = self._failed_starts.get(process.stage, 0) + 1
            self._ended(process)
        self._tell()
