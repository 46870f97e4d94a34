"""One instance as a process on this machine: its state, its signals, and requests other than tasks."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rlhfless_functions.api import Preload, Stage
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.platforms.base import InstanceState

_LEAST_POLL_SECONDS = 0.005
_POLL_SHARE = 0.02
"""Pause until the next poll, as a share of the time waited so far. Faster polls would slow down dozens of instances
that load for seconds."""


@dataclass
class LocalProcess:
    """An instance from its request until it is gone."""

    name: str
    stage: Stage
    state: InstanceState = "starting"
    begun: bool = False
    """Whether it is charged, which begins once the fork server is ready."""
    falling_asleep: bool = False
    """Whether it is being put to sleep."""
    terminated: bool = False
    """Whether it was told to end."""
    pid: int | None = None
    port: int | None = None
    last_part: tuple[int, str] | None = None
    """Step and part of its newest task."""
    idle_since: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Base URL of its server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def working(self) -> bool:
        """Whether it has its GPUs, and is not about to release them."""
        return self.state in ("starting", "idle") or self.has_task

    @property
    def has_task(self) -> bool:
        """Whether it has a task. It works on the task, or wakes for it."""
        return self.state == "busy" or (self.state == "switching" and not self.falling_asleep)

    @property
    def at_work(self) -> bool:
        """Whether it keeps its GPUs for a while: it has a task, or it starts."""
        return self.working and self.state != "idle"

    @property
    def asleep(self) -> bool:
        """Whether it is kept without GPUs."""
        return self.state == "asleep" and not self.terminated

    @property
    def leaving(self) -> bool:
        """Whether it is about to release its GPUs."""
        return self.state == "draining" or self.falling_asleep

    @property
    def kept(self) -> bool:
        """Whether it may get a task."""
        return self.asleep or self.working

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process exists."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def become_ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until it is ready, or no longer starting."""
        since = time.monotonic()
        while self.state == "starting":
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                async with session.get(f"{self.url}/readyz") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_poll_seconds(since))

    async def publish(self, session: aiohttp.ClientSession, within: float) -> bool:
        """Wait until a cut task has published its partial results. Returns False if that does not happen."""
        since = time.monotonic()
        try:
            async with asyncio.timeout(within):
                while self.has_task:
                    async with session.get(f"{self.url}/readyz") as response:
                        if not (await response.json())["busy"]:
                            return True
                    await asyncio.sleep(_poll_seconds(since))
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            return False
        return True

    async def sleep(self, session: aiohttp.ClientSession, token: str, within: float) -> bool:
        """Make it release its GPUs' memory. Returns False if it did not."""
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with asyncio.timeout(within), session.post(f"{self.url}/v1/sleep", headers=headers) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            return False


def _poll_seconds(since: float) -> float:
    return max(_LEAST_POLL_SECONDS, _POLL_SHARE * (time.monotonic() - since))


def instance_options(
    process: LocalProcess,
    preload: Preload | None,
    *,
    token: str,
    threads: int,
    emulation: EmulationSettings | None,
    gpus: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the options of an instance that starts now: `InstanceOptions` of the functions as JSON.

    Args:
        gpus: names of its GPUs; None if it gets none.
    """
    return {
        "stage": process.stage,
        "name": process.name,
        "token": token,
        "threads": threads,
        "started_at": time.time(),
        "preload": preload.model_dump(mode="json") if preload else None,
        "emulation": emulation.model_dump(mode="json") if emulation else None,
        "gpus": list(gpus) if gpus is not None else None,
    }
