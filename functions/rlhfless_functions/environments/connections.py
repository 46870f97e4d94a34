"""Connections to servers of environments: WebSockets, one for each episode.

A connection that is lost is a lost episode. No client goes on with a new one under an old history: the caller replays a
`replayable` episode, begins it anew, or counts it as failed.
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

from rlhfless_functions.environments.openenv_messages import ServerError, read_answer, short
from rlhfless_functions.environments.sessions import (
    EpisodeFailedError,
    EpisodeKilledError,
    EpisodeLateError,
    EpisodeUnreachableError,
    SessionLostError,
)
from rlhfless_functions.runtime.activity import limited_wait
from rlhfless_functions.settings import EnvironmentSettings

_log = logging.getLogger("rlhfless.environments")

CONNECT_SECONDS = 10.0
"""Time limit of a connection, and of the first answer to it."""
_PAUSE = 0.2
"""Seconds between two attempts."""
_LARGEST_MESSAGE = 2**27
_T = TypeVar("_T")


class _FullError(EpisodeUnreachableError):
    """The server has as many sessions as it allows. It says so, or its gateway holds further ones until one ends."""


class Server:
    """A server of environments, as its clients see it.

    Args:
        settings: the job's environment.
        url: its address.
        start_limit: seconds in which it may start, if none runs.
        remedy: what the address should be, for the error if something else listens there.
    """

    def __init__(self, settings: EnvironmentSettings, url: str, start_limit: float, remedy: str) -> None:
        self.settings = settings
        self.start_limit = start_limit
        self._remedy = remedy
        self._socket_url, self.schema_url = _urls(url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environment-server", daemon=True)
        self._thread.start()
        self._http: aiohttp.ClientSession | None = None
        self._turn = asyncio.Lock()
        """A full server is asked by one session at a time."""
        self._changed = time.monotonic()
        """Time when a session of this client began or ended last."""
        self._answered = -math.inf
        """Time when the server answered last."""

    def alive(self) -> bool:
        """Return whether it can be asked."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Close all connections."""
        if not self._thread.is_alive():
            return
        if self._http is not None:
            self.do(self._http.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, what: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Run a coroutine in the thread of the connections."""
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def left(self) -> None:
        """Note that a session ends."""
        self._changed = time.monotonic()

    async def http(self) -> aiohttp.ClientSession:
        """Return the client of HTTP."""
        if self._http is None:
            limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_connect=CONNECT_SECONDS)
            self._http = aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0))
        return self._http

    async def connected(self, patience: float) -> "Connection":
        """Connect. Wait while the server is full, and at most so long if nothing answers."""
        began = time.monotonic()

        def late(problem: EpisodeUnreachableError) -> float:
            if isinstance(problem, _FullError):
                return max(began, self._changed) + 2 * self.settings.episode_seconds
            return max(began, self._answered) + patience

        try:
            # Not in turns: as many servers are started as there are attempts, where they are started for them.
            return await self._attempt(self.start_limit)
        except EpisodeUnreachableError as error:
            problem = error
        async with self._turn:
            while (left := late(problem) - time.monotonic()) > 0:
                try:
                    return await self._attempt(min(left, self.start_limit))
                except EpisodeUnreachableError as error:
                    problem = error
                await asyncio.sleep(_PAUSE)
        raise problem

    async def _attempt(self, seconds: float) -> "Connection":
        url = self._socket_url
        try:
            # A server that is started for this connection answers once it runs.
            async with asyncio.timeout(seconds):
                socket = await (await self.http()).ws_connect(url, max_msg_size=_LARGEST_MESSAGE)
        except aiohttp.ConnectionTimeoutError as error:
            raise EpisodeUnreachableError(f"has no server at {url} ({error})") from None
        except TimeoutError:
            problem = f"has no server that answers at {url} within {self.start_limit:g} s"
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
                f"has a server at {url} that opens no WebSocket (it answers {error.status}); {self._remedy}"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EpisodeUnreachableError(f"has no server at {url} ({error})") from None
        connection = Connection(socket)
        try:
            # A server that is full says so only now.
            read_answer(await connection.exchange("state", None, CONNECT_SECONDS), "state")
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


class Line:
    """One episode's connection, which is made with its first request.

    Args:
        server: connects.
    """

    def __init__(self, server: Server) -> None:
        self.waited = 0.0
        """Seconds in which it waited for a connection."""
        self.closed = False
        self._server = server
        self._connection: Connection | None = None
        self._future: Future[Any] | None = None

    def exchange(self, kind: str, data: Mapping[str, Any] | None, seconds: float) -> str:
        """Send a message and return its answer; see `Connection.exchange`.

        Raises:
            EpisodeKilledError: this was closed.
            EpisodeUnreachableError: nothing answers there.
        """
        if self._connection is None:
            self._connect()
        assert self._connection is not None
        with limited_wait(seconds + CONNECT_SECONDS):
            return self._wait(self._connection.exchange(kind, data, seconds))

    def close(self) -> None:
        """Close the connection. Calls that wait for it end."""
        self.closed = True
        connection, future = self._connection, self._future
        if future is not None and connection is None:
            future.cancel()
        if connection is not None and self._server.alive():
            self._server.left()
            self._server.do(connection.close())

    def _connect(self) -> None:
        began = time.monotonic()
        settings = self._server.settings
        patience = max(settings.tool_seconds, self._server.start_limit)
        with limited_wait(2 * (settings.episode_seconds + patience + CONNECT_SECONDS)):
            self._connection = self._wait(self._server.connected(patience))
        self.waited += time.monotonic() - began
        if self.closed:
            self.close()

    def _wait(self, what: Coroutine[Any, Any, _T]) -> _T:
        if self.closed or not self._server.alive():
            what.close()
            raise EpisodeKilledError("was ended")
        future = self._future = self._server.do(what)
        if self.closed:
            # `close` may not have seen it.
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            raise EpisodeKilledError("was ended") from None
        except SessionLostError as error:
            raise (EpisodeKilledError("was ended") if self.closed else error) from None


class Connection:
    """A WebSocket whose messages are read at once: only a client that reads answers the server's pings."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._messages: asyncio.Queue[str | None] = asyncio.Queue()
        self._owed = True
        """Whether the server may send a message: the answer to a request, or that it is full, before the first one."""
        self._unasked: str | None = None
        """Message that answers nothing. All later answers would be taken for those of other requests."""
        self._reader = asyncio.create_task(self._read())

    async def exchange(self, kind: str, data: Mapping[str, Any] | None, seconds: float) -> str:
        """Send a message and return its answer.

        Raises:
            EpisodeLateError: it took longer. The connection is closed, as a late answer would belong to nothing.
            EpisodeFailedError: it answered more than once.
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
        return answer

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
