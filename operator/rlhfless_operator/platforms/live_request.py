"""A generation request with an open body. Samples join it and leave it."""

import asyncio
from collections.abc import AsyncGenerator

from pydantic import PrivateAttr

from rlhfless_functions.api import GenerationRequest, Line, dump_line


class LiveRequest(GenerationRequest):
    """A request with `live`, and the lines that follow it. Any platform takes it like another request."""

    _lines: "asyncio.Queue[Line | None]" = PrivateAttr(default_factory=asyncio.Queue)

    @classmethod
    def of(cls, request: GenerationRequest) -> "LiveRequest":
        """Return a request as one whose body stays open."""
        assert request.live is not None
        return cls(**dict(request))

    def send(self, line: Line) -> None:
        """Send a line after the request, once an instance has taken it."""
        self._lines.put_nowait(line)

    def end(self) -> None:
        """End the body: no more samples come."""
        self._lines.put_nowait(None)

    async def lines(self) -> AsyncGenerator[Line, None]:
        """Yield the lines as they are sent, until the body ends."""
        while (line := await self._lines.get()) is not None:
            yield line

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the body. An instance that refuses the request leaves the lines to the next one."""
        yield self.model_dump_json().encode() + b"\n"
        async for line in self.lines():
            yield dump_line(line)
