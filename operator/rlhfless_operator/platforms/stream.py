"""One task over HTTP: POST the request, read the events. Used for local processes and Knative Services alike."""

import asyncio
from collections.abc import AsyncGenerator

import aiohttp

from rlhfless_functions.api import Done, Event, Failed, Heartbeat, RunRequest, Started, parse_event
from rlhfless_operator.platforms.base import InstanceLostError, InstanceSilentError, TaskFailedError

_MAX_LINE_BYTES = 16 * 2**20


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
        stall_seconds: longest silence; functions send heartbeats well within it.
        start_seconds: longest time until the first line; by default `stall_seconds`.
        host: the `Host` header, if it differs from the URL's host.

    Raises:
        InstanceLostError: the stream ended without a terminal record; `InstanceSilentError` if it was silent too long.
        TaskFailedError: the task failed or was refused.
    """
    body = request.model_dump_json().encode()
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    if host is not None:
        headers["host"] = host
    patience = stall_seconds if start_seconds is None else start_seconds
    try:
        async with asyncio.timeout(patience):
            response = await session.post(f"{url}/v1/run", data=body, headers=headers)
        try:
            async for line in _lines(response.content, patience, stall_seconds):
                try:
                    event = parse_event(line)
                except ValueError as error:
                    # A proxy that times out appends its own text to a stream and then ends it normally.
                    raise InstanceLostError(f"HTTP {response.status}: {error}") from error
                patience = stall_seconds
                if isinstance(event, Failed):
                    raise TaskFailedError(event)
                yield event
                if isinstance(event, Done):
                    return
            raise InstanceLostError(f"HTTP {response.status}: the stream ended without a terminal record")
        finally:
            response.release()
    except (aiohttp.ClientError, ConnectionError) as error:
        raise InstanceLostError(f"{type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise InstanceSilentError(f"the instance was silent for {patience:g} s") from error


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
