"""What runs in a pod of an emulated Knative, and where it listens."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from rlhfless_operator.platforms.pods.manifests import PORT
from tests.clusters.fake_function import FakeFunction

_TICK_SECONDS = 0.02


@dataclass
class RunningFunction:
    """What runs in a pod.

    Args:
        host: where it listens, with `port`.
        terminate: what SIGTERM does; returns when the process has ended.
        kill: what SIGKILL does.
    """

    host: str
    port: int
    terminate: Callable[[], Awaitable[None]]
    kill: Callable[[], Awaitable[None]]
    function: FakeFunction | None = None


Launch = Callable[[str, Mapping[str, str]], Awaitable[RunningFunction]]
"""Starts what runs in a pod: its name, its environment → once it listens."""


async def listen(app: web.Application) -> tuple[str, Callable[[], Awaitable[None]]]:
    """Listen on the port of all pods, at an address of its own; returns the address and what ends it."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    while True:
        host = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        try:
            await web.TCPSite(runner, host, PORT).start()
        except OSError:
            await asyncio.sleep(0)
        else:
            return host, runner.cleanup


def fake_functions(exited: Callable[[str], None]) -> Launch:
    """Starts a `FakeFunction` in this process; `exited` is told the pod whose function has died."""

    async def launch(name: str, environment: Mapping[str, str]) -> RunningFunction:
        function = FakeFunction(name, environment.get("RLHFLESS_TOKEN", ""), exit=lambda: exited(name))
        host, end = await listen(function.app())

        async def terminate() -> None:
            function.drain()
            while function.busy:
                await asyncio.sleep(_TICK_SECONDS)
            await end()

        return RunningFunction(host, PORT, terminate, end, function)

    return launch
