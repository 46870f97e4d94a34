"""The body of a request that may stay open: the request, then the lines that follow it."""

import asyncio
from collections.abc import AsyncIterator

from rlhfless_functions.api import GenerationRequest, RunRequest, parse_line, parse_request
from rlhfless_functions.runtime.inbox import Inbox

_MOST_UNREAD = 1000
"""Most lines that wait in an inbox. A client that sends more waits."""
_UNREAD_SECONDS = 0.01


class TooLongError(Exception):
    """A request or a line has too many bytes."""


class Body:
    """The body of one HTTP request.

    Args:
        chunks: the bytes as they arrive.
        most_bytes: longest request, and longest line.
    """

    def __init__(self, chunks: AsyncIterator[bytes], most_bytes: int) -> None:
        self._chunks = chunks
        self._most_bytes = most_bytes
        self._pending = bytearray()

    async def request(self) -> RunRequest:
        """Read the request: the first line if it is live, otherwise the whole body.

        Raises:
            TooLongError: it is too long.
            UnsupportedProtocolError: it has another major version.
            ValueError: it is no request; the message names the fields.
        """
        searched = False
        async for chunk in self._chunks:
            self._pending += chunk
            if len(self._pending) > self._most_bytes:
                raise TooLongError(f"the request is longer than {self._most_bytes} bytes")
            if not searched and b"\n" in chunk:
                searched = True
                line, _, rest = bytes(self._pending).partition(b"\n")
                if (request := _live(line)) is not None:
                    self._pending = bytearray(rest)
                    return request
        return parse_request(bytes(self._pending))

    async def lines(self, inbox: Inbox) -> None:
        """Put the lines that follow a live request into an inbox, until the body ends. Then close the inbox.

        Raises:
            ValueError: a line is none; the message names the fields.
            TooLongError: a line is too long.
            ClientDisconnect: the client is gone.
        """
        await self._take(inbox)
        async for chunk in self._chunks:
            self._pending += chunk
            if b"\n" in chunk:
                await self._take(inbox)
            elif len(self._pending) > self._most_bytes:
                raise TooLongError(f"a line is longer than {self._most_bytes} bytes")
        inbox.close()

    async def _take(self, inbox: Inbox) -> None:
        *lines, rest = bytes(self._pending).split(b"\n")
        self._pending = bytearray(rest)
        for line in lines:
            while len(inbox) >= _MOST_UNREAD:
                await asyncio.sleep(_UNREAD_SECONDS)
            inbox.put(parse_line(line))


def _live(line: bytes) -> GenerationRequest | None:
    """Return the live request that a line is; None if it is the beginning of another request, or of none."""
    try:
        request = parse_request(line)
    except ValueError:
        return None
    return request if isinstance(request, GenerationRequest) and request.live is not None else None
