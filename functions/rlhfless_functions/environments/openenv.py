"""Environments that a server of OpenEnv plays: a client of its WebSocket. One connection is one episode.

A connection that is lost is a lost episode. The client never goes on with a new one under an old history: the caller
replays a `replayable` episode, or counts it as failed.
"""

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from rlhfless_functions.environments.openenv_messages import (
    Actions,
    Answer,
    ServerError,
    read_answer,
    short,
    tool_schemas,
)
from rlhfless_functions.environments.sessions import (
    EnvironmentUnusableError,
    EpisodeFailedError,
    EpisodeKilledError,
    EpisodeLateError,
    EpisodeUnreachableError,
    SessionLostError,
)
from rlhfless_functions.runtime.activity import limited_wait
from rlhfless_functions.settings import EnvironmentSettings

_log = logging.getLogger("rlhfless.environments")

_CONNECT_SECONDS = 10.0
"""Time limit of a connection, and of the first answer to it."""
_PAUSE = 0.2
"""Seconds between two attempts."""
_LARGEST_MESSAGE = 2**27
_T = TypeVar("_T")


class _FullError(EpisodeUnreachableError):
    """The server has as many sessions as it allows. It says so, or its gateway holds further ones until one ends."""


class OpenEnvHost:
    """A server of OpenEnv. The constructor connects once, to learn what tools it has.

    Args:
        settings: the job's environment, with `openenv`.

    Raises:
        EnvironmentUnusableError: nothing answers there, or something else does.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        openenv = settings.openenv
        assert openenv is not None and openenv.url is not None
        self._settings = settings
        self._start_limit = openenv.start_limit
        """Seconds in which a server may start, if none runs."""
        self._socket_url, self._schema_url = _urls(openenv.url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openenv", daemon=True)
        self._thread.start()
        self._http: aiohttp.ClientSession | None = None
        self._turn = asyncio.Lock()
        """A full server is asked by one session at a time."""
        self._changed = time.monotonic()
        """Time when a session of this host began or ended last."""
        self._answered = -math.inf
        """Time when the server answered last."""
        try:
            with limited_wait(self._start_limit + 2 * _CONNECT_SECONDS + settings.tool_seconds):
                self.schemas, self.actions = self._do(self._learnt()).result()
        except (EpisodeFailedError, SessionLostError) as error:
            self.close()
            raise EnvironmentUnusableError(str(error)) from error
        except BaseException:
            self.close()
            raise
        self.is_game = not self.schemas

    def alive(self) -> bool:
        """Return whether it can begin episodes."""
        return self._thread.is_alive()

    def begin(self) -> "OpenEnvSession":
        """Return a new session, which connects with its first request."""
        return OpenEnvSession(self, self._settings, self.actions)

    def close(self) -> None:
        """Close all connections."""
        if not self._thread.is_alive():
            return
        if self._http is not None:
            self._do(self._http.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Coroutine[Any, Any, _T]) -> "Future[_T]":
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    async def _connected(self, patience: float) -> "_Connection":
        """Connect. Wait while the server is full, and at most so long if nothing answers."""
        began = time.monotonic()

        def late(problem: EpisodeUnreachableError) -> float:
            if isinstance(problem, _FullError):
                return max(began, self._changed) + 2 * self._settings.episode_seconds
            return max(began, self._answered) + patience

        try:
            # Not in turns: as many servers are started as there are attempts, where they are started for them.
            return await self._attempt(self._start_limit)
        except EpisodeUnreachableError as error:
            problem = error
        async with self._turn:
            while (left := late(problem) - time.monotonic()) > 0:
                try:
                    return await self._attempt(min(left, self._start_limit))
                except EpisodeUnreachableError as error:
                    problem = error
                await asyncio.sleep(_PAUSE)
        raise problem

    async def _attempt(self, seconds: float) -> "_Connection":
        if self._http is None:
            limits = aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS, sock_connect=_CONNECT_SECONDS)
            self._http = aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0))
        url = self._socket_url
        try:
            # A server that is started for this connection answers once it runs.
            async with asyncio.timeout(seconds):
                socket = await self._http.ws_connect(url, max_msg_size=_LARGEST_MESSAGE)
        except aiohttp.ConnectionTimeoutError as error:
            raise EpisodeUnreachableError(f"has no server at {url} ({error})") from None
        except TimeoutError:
            problem = f"has no server that answers at {url} within {self._start_limit:g} s"
            if self._answered == -math.inf:
                raise EpisodeUnreachableError(problem) from None
            # It has answered before. A cluster's gateway holds sessions for which no server has room.
            raise _FullError(f"{problem}; it may be full: give it more sessions or containers") from None
        except aiohttp.WSServerHandshakeError as error:
            if error.status >= 500:
                raise EpisodeUnreachableError(f"has a server at {url} that answers {error.status}") from None
            # A gateway answers 404 while it does not know the server yet.
            kind = EpisodeUnreachableError if error.status in (404, 429) else EpisodeFailedError
            raise kind(
                f"has a server at {url} that opens no WebSocket (it answers {error.status}); environment.openenv.url is"
                " the address of a server of OpenEnv 0.2 or later, without /ws"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EpisodeUnreachableError(f"has no server at {url} ({error})") from None
        connection = _Connection(socket)
        try:
            # A server that is full says so only now.
            await connection.exchange("state", None, _CONNECT_SECONDS)
        except ServerError as error:
            if error.code == "CAPACITY_REACHED":
                self._answered = time.monotonic()
                await connection.close()
                raise _FullError(
                    f"has a server at {url} that is full ({error}); give it more sessions (max_concurrent_envs)"
                ) from None
            if error.code in ("FACTORY_ERROR", "SESSION_ERROR"):
                await connection.close()
                raise EpisodeFailedError(f"can't be made by its server: {error}") from None
        except SessionLostError:
            raise EpisodeUnreachableError(f"has a server at {url} that closes each connection") from None
        except BaseException:
            await connection.close()
            raise
        self._changed = self._answered = time.monotonic()
        return connection

    async def _learnt(self) -> tuple[list[dict[str, Any]], Actions]:
        """Return the schemas of the tools, and what actions are made of."""
        connection = await self._connected(self._start_limit)
        try:
            answer = await connection.exchange("step", {"type": "list_tools"}, self._settings.tool_seconds)
            return tool_schemas(answer), Actions({})
        except ServerError:
            return [], Actions(await self._action_schema())
        finally:
            await connection.close()

    async def _action_schema(self) -> Mapping[str, Any]:
        assert self._http is not None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS), self._http.get(self._schema_url) as response:
                schema = (await response.json())["action"] if response.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, OSError):
            schema = {}
        return schema if isinstance(schema, dict) else {}


class OpenEnvSession:
    """An episode on a server; see `Session`.

    Args:
        host: connects.
        settings: the job's environment.
        actions: what actions are made of, if the environment has no tools.
    """

    def __init__(self, host: OpenEnvHost, settings: EnvironmentSettings, actions: Actions) -> None:
        self.waited = 0.0
        self._host = host
        self._settings = settings
        self._actions = actions
        self._connection: _Connection | None = None
        self._future: Future[Any] | None = None
        self._closed = False
        self._rewards = 0.0

    def ask(self, request: dict[str, Any], seconds: float, memory: int) -> dict[str, Any]:
        """Ask, and wait for the answer; see `Session`."""
        del memory  # The server's own.
        if request["do"] == "score":
            return {"score": self._rewards}
        try:
            if self._connection is None:
                self._connect()
            with limited_wait(seconds + _CONNECT_SECONDS):
                return self._answer(request, seconds)
        except SessionLostError as error:
            # An episode that can't be played again is a failed one, unless nothing has happened in it.
            if self._closed or self._settings.replayable or request["do"] == "begin":
                raise
            raise EpisodeFailedError(str(error)) from error

    def close(self) -> None:
        """Close the connection. Calls that wait for it end."""
        self._closed = True
        connection, future = self._connection, self._future
        if future is not None and connection is None:
            future.cancel()
        if connection is not None and self._host.alive():
            self._host._changed = time.monotonic()
            self._host._do(connection.close())

    def _connect(self) -> None:
        began = time.monotonic()
        patience = max(self._settings.tool_seconds, self._host._start_limit)
        with limited_wait(2 * (self._settings.episode_seconds + patience + _CONNECT_SECONDS)):
            self._connection = self._wait(self._host._connected(patience))
        self.waited += time.monotonic() - began
        if self._closed:
            self.close()

    def _answer(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        do, longest = request["do"], self._settings.result_bytes
        if do == "begin":
            row = json.loads(json.dumps({"seed": request["seed"] % 2**31, **request["row"]}, default=str))
            try:
                return {"text": self._exchange("reset", row, seconds).text(longest) or None}
            except ServerError as error:
                raise EpisodeFailedError(f"raised in reset: {error}") from error
        if do == "call":
            action = {"type": "call_tool", "tool_name": request["name"], "arguments": request["arguments"]}
            try:
                return self._exchange("step", action, seconds).of_call(longest)
            except ServerError as error:
                fault = "wrong_arguments" if error.code == "VALIDATION_ERROR" else "raised"
                return {"fault": fault, "message": str(error)}
        read = self._actions.read(request["text"])
        if isinstance(read, str):
            return {"text": f"Error: {read}", "done": False, "fault": "unparsed"}
        try:
            answer = self._exchange("step", read, seconds)
        except ServerError as error:
            if error.code == "VALIDATION_ERROR":
                return {"text": f"Error: {error}", "done": False, "fault": "wrong_arguments"}
            raise EpisodeFailedError(f"raised in step: {error}") from error
        return {"text": answer.text(longest), "done": answer.done}

    def _exchange(self, kind: str, data: Mapping[str, Any], seconds: float) -> Answer:
        assert self._connection is not None
        answer = self._wait(self._connection.exchange(kind, data, seconds))
        self._rewards += answer.reward
        if not math.isfinite(self._rewards):
            raise EpisodeFailedError("gave a reward that is not a finite number")
        return answer

    def _wait(self, what: Coroutine[Any, Any, _T]) -> _T:
        if self._closed or not self._host.alive():
            what.close()
            raise EpisodeKilledError("was ended")
        future = self._future = self._host._do(what)
        if self._closed:
            # `close` may not have seen it.
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            raise EpisodeKilledError("was ended") from None
        except SessionLostError as error:
            raise (EpisodeKilledError("was ended") if self._closed else error) from None


class _Connection:
    """A WebSocket whose messages are read at once: only a client that reads answers the server's pings."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._messages: asyncio.Queue[str | None] = asyncio.Queue()
        self._owed = True
        """Whether the server may send a message: the answer to a request, or that it is full, before the first one."""
        self._unasked: str | None = None
        """Message that answers nothing. All later answers would be taken for those of other requests."""
        self._reader = asyncio.create_task(self._read())

    async def exchange(self, kind: str, data: Mapping[str, Any] | None, seconds: float) -> Answer:
        """Send a message and return its answer.

        Raises:
            ServerError: the server answered with an error.
            EpisodeLateError: it took longer. The connection is closed, as a late answer would belong to nothing.
            EpisodeFailedError: it answered what the protocol does not have.
            SessionLostError: the connection is lost.
        """
        text = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        # A message that came before the first request is its answer.
        self._owed = self._messages.empty()
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send_str(text)
                answer = await self._messages.get()
        except TimeoutError:
            await self.close()
            raise EpisodeLateError(f"took longer than {seconds:g} s") from None
        except (aiohttp.ClientError, OSError):
            answer = None
        if answer is None:
            self._messages.put_nowait(None)
            if self._unasked is not None:
                raise EpisodeFailedError(f"has a server that sent more than one answer ({short(self._unasked)})")
            raise SessionLostError("lost its connection to the server")
        return read_answer(answer, kind)

    async def close(self) -> None:
        """Tell the server, and close the connection."""
        try:
            async with asyncio.timeout(1):
                if not self._socket.closed:
                    await self._socket.send_str('{"type": "close"}')
                    await self._socket.close()
        except (TimeoutError, aiohttp.ClientError, OSError):
            _log.debug("a connection to an environment did not close in time")
        self._reader.cancel()
        self._messages.put_nowait(None)

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                if message.type == aiohttp.WSMsgType.TEXT:
                    text = message.data
                elif message.type == aiohttp.WSMsgType.BINARY:
                    text = message.data.decode(errors="replace")
                else:
                    continue
                if not self._owed:
                    self._unasked = text
                    await self._socket.close()
                    break
                self._owed = False
                self._messages.put_nowait(text)
        except (aiohttp.ClientError, OSError):
            pass
        self._messages.put_nowait(None)


def _urls(url: str) -> tuple[str, str]:
    """Return the addresses of a server's WebSocket and of its schemas."""
    parts = urlsplit(url)
    secure = parts.scheme in ("https", "wss")
    path = parts.path.rstrip("/").removesuffix("/ws")
    socket = urlunsplit(("wss" if secure else "ws", parts.netloc, f"{path}/ws", parts.query, ""))
    return socket, urlunsplit(("https" if secure else "http", parts.netloc, f"{path}/schema", parts.query, ""))
