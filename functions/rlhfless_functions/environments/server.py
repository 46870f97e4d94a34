"""A server of the user's own environments: `python -m rlhfless_functions.environments.server SETTINGS`.

It listens on HOST and PORT. SETTINGS is JSON of the job's environment: files, tools and limits. Each WebSocket at `/ws`
is one episode, in processes of its own:

    state      asks whether the server is there
    describe   asks for the tools
    ask        puts one of the requests of `Session`, with its time limit
    close      ends the episode, as the end of the connection does
"""

import asyncio
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import WSMsgType, web

from rlhfless_functions.environments.host import EpisodeHost, EpisodeProcess
from rlhfless_functions.environments.sessions import (
    EnvironmentUnusableError,
    EpisodeFailedError,
    EpisodeKilledError,
    EpisodeLateError,
)
from rlhfless_functions.runtime import logs
from rlhfless_functions.runtime.processes import name_process
from rlhfless_functions.settings import EnvironmentSettings

_PING_SECONDS = 20.0
"""Time after which a client that is gone without a word is noticed. Its episode ends."""
_LARGEST_MESSAGE = 2**27
_MOST_THREADS = 4096
"""Most episodes that work at a time."""
_CODES: dict[type[Exception], str] = {
    EnvironmentUnusableError: "UNUSABLE",
    EpisodeLateError: "LATE",
    EpisodeFailedError: "FAILED",
    EpisodeKilledError: "KILLED",
}


class EnvironmentServer:
    """The environments of one job.

    Args:
        settings: the job's environment.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings
        self._host: EpisodeHost | None = None
        self._lock = threading.Lock()

    def host(self) -> EpisodeHost:
        """Return a host that runs.

        Raises:
            EnvironmentUnusableError: the files can't be used.
        """
        with self._lock:
            if self._host is not None and not self._host.alive():
                self._host.close()
                self._host = None
            if self._host is None:
                self._host = EpisodeHost(self.settings)
            return self._host

    def close(self) -> None:
        """End all episodes."""
        if self._host is not None:
            self._host.close()

    def app(self) -> web.Application:
        """Return the application that serves them."""
        app = web.Application()
        app.router.add_get("/ws", self._serve)
        return app

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=_PING_SECONDS, max_msg_size=_LARGEST_MESSAGE)
        await socket.prepare(request)
        episode = _ServedEpisode(self)
        # A connection is read while its episode works: only so is its end noticed.
        asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=1)
        answering = asyncio.create_task(_answer(socket, episode, asked))
        try:
            async for message in socket:
                request_of = _read(message.data) if message.type == WSMsgType.TEXT else None
                if request_of is None or request_of["type"] == "close" or asked.full():
                    break
                asked.put_nowait(request_of)
        finally:
            # Its thread comes back.
            episode.close()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        await socket.close()
        return socket


class _ServedEpisode:
    """The episode of one connection. Its methods but `close` wait, in threads."""

    def __init__(self, server: EnvironmentServer) -> None:
        self._server = server
        self._process: EpisodeProcess | None = None
        self._closed = False

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a message."""
        try:
            if message["type"] == "state":
                return {"type": "state"}
            if message["type"] == "describe":
                host = self._server.host()
                return {"type": "description", "data": {"schemas": host.schemas, "game": host.is_game}}
            return {"type": "answer", "data": self._asked(message["data"]["request"], message["data"]["seconds"])}
        except tuple(_CODES) as error:
            code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
            return _error(code, str(error))
        except (KeyError, TypeError, ValueError) as error:
            return _error("INVALID", f"is not asked as it wants to be ({error!r})")

    def close(self) -> None:
        """End the episode. A thread that waits for it goes on."""
        self._closed = True
        if self._process is not None:
            self._process.close()

    def _asked(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        began = time.monotonic()
        if self._process is None:
            # The files may not have run yet.
            self._process = self._server.host().begin()
            if self._closed:
                self._process.close()
        loaded, waited = time.monotonic() - began, self._process.waited
        settings = self._server.settings
        answer = self._process.ask(request, min(float(seconds), settings.tool_seconds), settings.memory)
        return {"answer": answer, "waited": loaded + self._process.waited - waited}


async def _answer(socket: web.WebSocketResponse, episode: _ServedEpisode, asked: asyncio.Queue[dict[str, Any]]) -> None:
    """Answer one message after the other."""
    while True:
        answer = await asyncio.to_thread(episode.answer, await asked.get())
        await socket.send_str(json.dumps(answer))


def _read(text: str) -> dict[str, Any] | None:
    """Return a message; None if it is none."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("type"), str) else None


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}


async def _app(server: EnvironmentServer) -> web.Application:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="episode"))
    # The first client is told if the files can't be used.
    loop.run_in_executor(None, server.host).add_done_callback(lambda loaded: loaded.cancelled() or loaded.exception())
    return server.app()


def main() -> None:
    """Serve until SIGTERM."""
    name_process("environments")
    logs.configure(instance="environments")
    server = EnvironmentServer(EnvironmentSettings.model_validate_json(sys.argv[1]))
    try:
        place = {"host": os.environ["HOST"], "port": int(os.environ["PORT"])}
        web.run_app(_app(server), **place, print=None, access_log=None, shutdown_timeout=1.0)
    finally:
        server.close()


if __name__ == "__main__":
    main()
