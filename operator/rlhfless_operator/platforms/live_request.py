"""A generation request with an open body. Samples join it and leave it."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Self

from pydantic import PrivateAttr

from rlhfless_functions.api import GenerationRequest, Line, dump_line


class _Lines:
    """The lines of a request in their order; None is the end. Copies of the request share them."""

    def __init__(self) -> None:
        self._lines: deque[Line | None] = deque()
        self._dropped = 0
        """Number of lines that were sent before the first one here."""
        self._readers = 0
        self._more = asyncio.Event()
        self.are_kept = True
        """Whether another reader may need them from the first one."""

    def put(self, line: Line | None) -> None:
        self._lines.append(line)
        more, self._more = self._more, asyncio.Event()
        more.set()

    async def read(self) -> AsyncGenerator[Line, None]:
        """Yield the lines from the first one that is kept, until the end."""
        self._readers += 1
        reader, number = self._readers, 0
        while True:
            number = max(number, self._dropped)
            while number == self._dropped + len(self._lines):
                await self._more.wait()
            line = self._lines[number - self._dropped]
            number += 1
            if line is None:
                return
            yield line
            if not self.are_kept and reader == self._readers:
                while self._dropped < number:
                    self._lines.popleft()
                    self._dropped += 1


class LiveRequest(GenerationRequest):
    """A request with `live`, and the lines that follow it. Any platform takes it like another request."""

    _lines: _Lines = PrivateAttr(default_factory=_Lines)
    _change: Callable[[Line], Line] | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, request: GenerationRequest) -> "LiveRequest":
        """Return a request as one whose body stays open."""
        assert request.live is not None
        return cls(**dict(request))

    def send(self, line: Line) -> None:
        """Send a line after the request. The instance that takes the request gets it."""
        self._lines.put(line)

    def end(self) -> None:
        """End the body: no more samples come."""
        self._lines.put(None)

    def is_taken(self) -> None:
        """Note that an instance has taken the request. Lines are dropped once they are sent to it, so that a body that
        is open for long takes no memory."""
        self._lines.are_kept = False

    def with_lines(self, change: Callable[[Line], Line]) -> Self:
        """Return this request with a change of each line that follows it."""
        made = self.model_copy()
        made._change = change
        return made

    async def lines(self) -> AsyncGenerator[Line, None]:
        """Yield all lines, as they are sent, until the body ends."""
        async for line in self._lines.read():
            yield line if self._change is None else self._change(line)

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the body. An instance that refuses the request has carried out none of the lines: the next one gets
        all of them."""
        yield self.model_dump_json().encode() + b"\n"
        async for line in self.lines():
            yield dump_line(line)
