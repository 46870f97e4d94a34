"""A function that speaks the wire contract and does nothing: for tests of platforms, in a process or in an image.

It needs aiohttp alone. What it is to do is written in the request's `key.part`, separated by commas:

    work=2      seconds until the task is done
    publish=1   seconds that a task which is cut or drained needs to publish what it had
    silent      no line is ever written
    mute        no line is written after the first
    stubborn    neither a cut nor SIGTERM ends the task before its time
    fail        the task ends with a `failed` record
    exit        the process dies at once, after its first line
    truncate    the stream ends in good order without a terminal record, after words of a proxy
"""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeFunction:
    """One instance.

    Args:
        exit: ends the process, where a task asks for it.
    """

    name: str
    token: str
    exit: Callable[[], None]
    ready: bool = True
    busy: bool = False
    draining: bool = False
    served: list[str] = field(default_factory=list)
    """The parts of the requests that were taken."""
    sleep_seconds: float = 0.0
    """That it takes to give its memory back."""
    awake: bool = False
    """Whether it has its GPU's memory: from its first task on, until it is put to sleep."""
    told: list[tuple[float, str]] = field(default_factory=list)
    """When it woke, worked and slept, in monotonic seconds."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def app(self) -> web.Application:
        """The instance's HTTP face."""
        app = web.Application()
        app.router.add_post("/v1/run", self._run)
        app.router.add_post("/v1/sleep", self._sleep)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/healthz", self._healthz)
        return app

    def drain(self) -> None:
        """What SIGTERM does."""
        self.told.append((time.monotonic(), "asleep"))
        self.draining = True
        self._stop.set()

    async def _readyz(self, request: web.Request) -> web.Response:
        ready = self.ready and not self.draining
        return web.json_response({"ready": ready, "busy": self.busy}, status=200 if ready else 503)

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _sleep(self, request: web.Request) -> web.Response:
        if self.busy:
            return _refusal(409, "busy", "the instance does one task at a time", retryable=True)
        self.busy = True
        await asyncio.sleep(self.sleep_seconds)
        self.busy = self.awake = False
        self.told.append((time.monotonic(), "asleep"))
        return web.json_response({"seconds": self.sleep_seconds})

    async def _run(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _refusal(401, "bad_request", "the bearer token is not this job's")
        if self.draining:
            return _refusal(503, "drained", "the instance is going away", retryable=True)
        if self.busy:
            return _refusal(409, "busy", "the instance does one task at a time", retryable=True)
        body = await request.json()
        part = body["key"]["part"]
        options = dict(option.partition("=")[::2] for option in part.split(","))
        self.busy = self.awake = True
        self.told.append((time.monotonic(), "awake"))
        self._stop.clear()
        self.served.append(part)
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        finished = False
        try:
            await response.prepare(request)
            if "silent" not in options:
                await _say(response, event="started", protocol="1.0", instance=self.name)
            if "exit" in options:
                self.exit()
                await asyncio.sleep(3600)
            if "truncate" in options:
                await response.write(b"activator request timeout")
                return response
            finished = await self._work(response, options, body.get("heartbeat_seconds", 5.0))
            if "fail" in options:
                await _say(response, event="failed", reason="internal", message="asked to fail", retryable=True)
            elif finished or self.draining:
                await _say(response, event="done", result={"instance": self.name, "finished": finished})
        finally:
            seconds = float(options["work"]) if "stubborn" in options else float(options.get("publish") or 0)
            task = asyncio.create_task(self._publish(0.0 if finished else seconds))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return response

    async def _work(self, response: web.StreamResponse, options: dict[str, str], heartbeat: float) -> bool:
        end = time.monotonic() + float(options.get("work") or 0)
        quiet = "silent" in options or "mute" in options
        while (left := end - time.monotonic()) > 0 or quiet:
            try:
                stop = asyncio.Event() if "stubborn" in options else self._stop
                await asyncio.wait_for(stop.wait(), heartbeat if quiet else min(left, heartbeat))
                await asyncio.sleep(float(options.get("publish") or 0))
                return False
            except TimeoutError:
                if not quiet:
                    await _say(response, event="heartbeat")
        return True

    async def _publish(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.busy = False


async def _say(response: web.StreamResponse, **event: Any) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


def _refusal(status: int, reason: str, message: str, *, retryable: bool = False) -> web.Response:
    event = {"event": "failed", "reason": reason, "message": message, "retryable": retryable}
    return web.Response(status=status, text=json.dumps(event) + "\n", content_type="application/x-ndjson")


async def main() -> None:
    """A container's process."""
    ended = asyncio.Event()
    function = FakeFunction(
        os.environ.get("HOSTNAME", socket.gethostname()), os.environ["RLHFLESS_TOKEN"], exit=lambda: os._exit(1)
    )
    runner = web.AppRunner(function.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", int(os.environ.get("PORT", "8080"))).start()

    def terminate() -> None:
        function.drain()
        ended.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    await ended.wait()
    while function.busy:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main())
