"""The server of an environment as a process on this machine, and a platform whose tasks get its address."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from rlhfless_functions.api import Event, Preload, RunRequest, Stage
from rlhfless_functions.runtime.addresses import free_port
from rlhfless_functions.settings import OpenEnvEnvironment
from rlhfless_operator.errors import UserError
from rlhfless_operator.platforms.base import InstanceState, Platform, StateChange, StateListener
from rlhfless_operator.platforms.environments import addressed, needs_server

_POLL_SECONDS = 0.1
_END_SECONDS = 5.0
_FREE_SECONDS = 60.0
"""Longest wait for the address of the process before."""
_HOST = "127.0.0.1"
_LONGEST_PAUSE = 30.0
_RUN = """
import os, signal, subprocess, sys, threading

def end_with_the_driver():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)

signal.signal(signal.SIGTERM, lambda *_: None)
command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=end_with_the_driver, daemon=True).start()
status = command.wait()
sys.exit(status if status >= 0 else 128 - status)
"""
"""Runs a command as the leader of its process group, and ends the group once standard input ends: that of a driver that
is killed, too. The command gets SIGTERM as all of the group, and decides what it means."""


class EnvironmentServerError(UserError):
    """The server can't be started here; the message has the remedy."""


def check_command(server: OpenEnvEnvironment) -> list[str]:
    """Return the command that starts a server here.

    Raises:
        EnvironmentServerError: there is none for this machine.
    """
    if server.command is None:
        raise EnvironmentServerError(
            "spec.environment.openenv.image runs on a cluster only; add openenv.command, which starts the server on"
            " this machine, or start one yourself and write openenv.url in place of openenv.image"
        )
    return server.command


class EnvironmentServer:
    """A server of OpenEnv on this machine: started when it is asked for, and again after it has ended.

    Args:
        server: how it is started.
        log_path: file to which it writes.
        on_state: called with every change of its state.

    Raises:
        EnvironmentServerError: see `check_command`.
    """

    def __init__(
        self, server: OpenEnvEnvironment, log_path: Path, on_state: StateListener = lambda change: None
    ) -> None:
        self._command = check_command(server)
        self._environment = {"MAX_CONCURRENT_ENVS": str(server.sessions or 1), "HOST": _HOST}
        self._start_limit = server.start_limit
        self._log_path = log_path
        self._on_state = on_state
        self._keeping: asyncio.Task[None] | None = None
        self._listens = asyncio.Event()
        self._port = 0
        self._number = 0

    async def url(self) -> str:
        """Return its address once it listens. Start it unless it runs.

        Raises:
            EnvironmentServerError: it does not start.
        """
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())
        listens = asyncio.create_task(self._listens.wait())
        try:
            await asyncio.wait([listens, self._keeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            listens.cancel()
        if self._keeping.done():
            self._keeping.result()
        return f"http://{_HOST}:{self._port}"

    async def close(self) -> None:
        """End it with all processes of its group."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        """Run it, again and again. A server that ends before it listens is not started again."""
        self._port = free_port()
        while True:
            self._number += 1
            await self._until_its_address_is_free()
            process = await self._start()
            self._tell("starting")
            try:
                await self._until_it_listens(process)
                self._tell("busy")
                self._listens.set()
                await process.wait()
            finally:
                self._listens.clear()
                await _end(process)
                self._tell("ended")
            await asyncio.sleep(_pause(self._number))

    async def _until_its_address_is_free(self) -> None:
        # A process that was killed may listen for a moment more.
        deadline = time.monotonic() + (_FREE_SECONDS if self._number > 1 else 0.0)
        while await _answers(self._port):
            if time.monotonic() >= deadline:
                raise self._missing(f"can't listen on {_HOST}:{self._port}, where something else does")
            await asyncio.sleep(_POLL_SECONDS)

    async def _start(self) -> asyncio.subprocess.Process:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        own = {**self._environment, "PORT": str(self._port)}
        # The functions' Python comes first, as in their image.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        with self._log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _RUN),
                *(_expanded(argument, own) for argument in self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PATH": path, **own},
            )

    async def _until_it_listens(self, process: asyncio.subprocess.Process) -> None:
        deadline = time.monotonic() + self._start_limit
        while True:
            listens = await _answers(self._port)
            if process.returncode is not None:
                raise self._missing(f"ends with status {process.returncode} before it listens")
            if listens:
                return
            if time.monotonic() > deadline:
                raise self._missing(f"does not listen on {_HOST}:{self._port} within {self._start_limit:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    def _missing(self, problem: str) -> EnvironmentServerError:
        return EnvironmentServerError(
            f"the server of spec.environment {problem}; see {self._log_path}. It must listen on the"
            " port of the variable PORT, which the command may name as $(PORT)"
        )

    def _tell(self, state: InstanceState) -> None:
        self._on_state(StateChange(f"environment-{self._number}", "environment", state, time.monotonic()))


class ServingEnvironment:
    """A platform that runs the server of a job's environment beside its instances.

    Args:
        platform: where the functions run.
        server: the server.
    """

    def __init__(self, platform: Platform, server: EnvironmentServer) -> None:
        self._platform = platform
        self._server = server

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """Set the wanted number of instances of a stage; see `Platform.hold`."""
        await self._platform.hold(stage, count, preload)

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """Send a task to a free instance of its stage; see `Platform.run`.

        Raises:
            EnvironmentServerError: the task needs the server, which does not start.
        """
        if needs_server(request):
            request = addressed(request, await self._server.url())
        async with aclosing(self._platform.run(request)) as events:
            async for event in events:
                yield event

    async def close(self) -> None:
        """End every instance, and then the server."""
        try:
            await self._platform.close()
        finally:
            await self._server.close()


def _pause(starts: int) -> float:
    """Return the seconds before the next start, after so many: longer each time."""
    return min(_POLL_SECONDS * 2.0 ** min(starts, 20), _LONGEST_PAUSE)


def _expanded(argument: str, variables: dict[str, str]) -> str:
    """Replace `$(NAME)`, as Kubernetes does."""
    for name, value in variables.items():
        argument = argument.replace(f"$({name})", value)
    return argument


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(_HOST, port)
    except OSError:
        return False
    writer.close()
    return True


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process with its session."""
    for order, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, order)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
