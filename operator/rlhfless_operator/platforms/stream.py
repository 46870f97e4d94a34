"""One task over HTTP: POST the request, read the events. Used for local processes and Knative Services alike."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import aiohttp

from rlhfless_functions.api import (
    Event,
    Failed,
    GenerationRequest,
    Heartbeat,
    LearnRequest,
    RunRequest,
    Started,
    ends_task,
    parse_event,
)
from rlhfless_operator.platforms.base import InstanceLostError, InstanceSilentError, TaskFailedError
from rlhfless_operator.platforms.live_request import LiveRequest

_MAX_LINE_BYTES = 4 * 2**20
_MOST_LINES = 2000
"""Most events of an instance in a second; more of them wait."""
_MOST_BYTES = 16 * 2**20
"""Most bytes of an instance's events in a second."""
_MOST_PROGRESS = 1000
"""Most reports of progress in a second that a process asks all of its streams for."""
_open: set[object] = set()
"""The streams that this process reads."""


def open_session() -> aiohttp.ClientSession:
    """Return a session without a limit on the length of a stream. `stall_seconds` below limits silence."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        read_bufsize=2**18,
        connector=aiohttp.TCPConnector(limit=0),
    )


def shows_work(event: Event) -> bool:
    """Return whether an event shows that a sleeping instance is awake and works.

    The server sends `started` when it takes the request, and heartbeats during silence. All other events come from the
    function, which sends them once it has its memory again.
    """
    return not isinstance(event, Started | Heartbeat)


async def run_task(
    session: aiohttp.ClientSession,
    url: str,
    token: str,
    request: RunRequest,
    *,
    stall_seconds: float,
    start_seconds: float | None = None,
    host: str | None = None,
) -> AsyncGenerator[Event, None]:
    """Yield a task's events, the `Done` record last. Closing the generator closes the stream, which cuts the task.

    Args:
        url: base URL of the instance or Service.
        token: the job's bearer token.
        stall_seconds: longest silence, and longest time without work unless it is a gang's; functions send heartbeats
            well within it.
        start_seconds: longest time until the first line; by default `stall_seconds`.
        host: the `Host` header, if it differs from the URL's host.

    Raises:
        InstanceLostError: the stream ended without a terminal record; `InstanceSilentError` if it was silent too long,
            or if the instance reported for too long that nothing works in it.
        TaskFailedError: the task failed or was refused.
    """
    stream = object()
    _open.add(stream)
    rarer = with_rarer_progress(request, len(_open))
    response: aiohttp.ClientResponse | None = None
    fault: Exception | None = None

    def broken(error: Exception) -> None:
        # aiohttp swallows the error of a body, and the stream would go on without the rest of its lines.
        nonlocal fault
        fault = error
        if response is not None:
            response.close()

    body = _watched(rarer.body(), broken) if isinstance(rarer, LiveRequest) else rarer.model_dump_json().encode()
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    if host is not None:
        headers["host"] = host
    patience = stall_seconds if start_seconds is None else start_seconds
    try:
        async with asyncio.timeout(patience):
            response = await session.post(f"{url}/v1/run", data=body, headers=headers, allow_redirects=False)
        try:
            pace = Pace()
            async for line in _lines(response.content, patience, stall_seconds):
                await pace.keep(len(line))
                try:
                    event = parse_event(line)
                except ValueError as error:
                    # A proxy that times out appends its own text to a stream and then ends it normally.
                    raise InstanceLostError(f"HTTP {response.status}: {error}") from error
                patience = stall_seconds
                if isinstance(event, Heartbeat) and event.still_seconds >= stall_seconds and not _waits(request):
                    raise InstanceSilentError(f"nothing has worked in the instance for {event.still_seconds:.0f} s")
                if isinstance(event, Failed) and event.of is None:
                    raise TaskFailedError(event)
                if isinstance(event, Started) and isinstance(request, LiveRequest):
                    request.is_taken()
                yield event
                if ends_task(event):
                    return
            raise InstanceLostError(f"HTTP {response.status}: the stream ended without a terminal record")
        finally:
            response.release()
    except (aiohttp.ClientError, ConnectionError) as error:
        if fault is not None:
            raise fault from None
        raise InstanceLostError(f"{type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise InstanceSilentError(f"the instance was silent for {patience:g} s") from error
    finally:
        _open.discard(stream)


async def _watched(
    body: AsyncGenerator[bytes, None], broken: Callable[[Exception], None]
) -> AsyncGenerator[bytes, None]:
    """Yield a body, and tell an error that ends it."""
    try:
        async for piece in body:
            yield piece
    except Exception as error:
        broken(error)
        raise


def with_rarer_progress(request: RunRequest, streams: int) -> RunRequest:
    """Return a request whose progress is reported more rarely, if this process reads very many streams.

    Nothing depends on when progress is reported but the time of a move. What an instance writes down, and how soon its
    silence is noticed, stays as it is.
    """
    if not isinstance(request, GenerationRequest):
        return request
    seconds = max(request.progress_seconds, streams / _MOST_PROGRESS)
    return request.model_copy(update={"progress_seconds": seconds})


def _waits(request: RunRequest) -> bool:
    """Return whether an instance may stand still because it waits for others of its gang. All of their streams tell
    whether the gang does (`training/instances/gang.py`)."""
    return isinstance(request, LearnRequest) and request.gang is not None


class Pace:
    """Reads no more of a stream than an honest instance sends: one that floods its driver waits, and no other does."""

    def __init__(self) -> None:
        self._began, self._lines, self._bytes = time.monotonic(), 0, 0

    async def keep(self, size: int) -> None:
        """Count a line, and wait for the next second if this one has had enough of them."""
        self._lines += 1
        self._bytes += size
        now = time.monotonic()
        if now - self._began >= 1.0:
            self._began, self._lines, self._bytes = now, 0, 0
        elif self._lines > _MOST_LINES or self._bytes > _MOST_BYTES:
            await asyncio.sleep(self._began + 1.0 - now)
        elif self._lines % 64 == 0:
            # What has arrived is read without a pause.
            await asyncio.sleep(0)


async def _lines(
    content: aiohttp.StreamReader, first_seconds: float, stall_seconds: float
) -> AsyncGenerator[bytes, None]:
    pending = bytearray()
    patience = first_seconds
    while True:
        async with asyncio.timeout(patience):
            chunk = await content.readany()
        patience = stall_seconds
        if not chunk:
            if pending:
                yield bytes(pending)
            return
        pending += chunk
        if b"\n" in chunk:
            *lines, rest = bytes(pending).split(b"\n")
            pending = bytearray(rest)
            for line in lines:
                yield line
        elif len(pending) > _MAX_LINE_BYTES:
            raise InstanceLostError(f"a line of over {_MAX_LINE_BYTES} bytes")
