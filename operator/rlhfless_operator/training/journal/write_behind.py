"""Writes in the background, in their order."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

HEAD_START_SECONDS = 0.05
"""By which what is urgent, the next stage's requests, goes before writes: both need the interpreter and the disk."""


class WriteBehind:
    """Carries writes out one after another while its owner goes on.

    After one that has failed none is made any more: what a later one says may rest on it.
    """

    def __init__(self) -> None:
        self._last: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def add(self, write: Callable[[], Awaitable[None]]) -> None:
        """Have this written after all that was added before."""
        self._last = asyncio.create_task(self._after(self._last, write))

    async def done(self) -> None:
        """Wait for all of them; to be cancelled meanwhile stops none. Raises what the first to fail has raised."""
        if self._last is None:
            return
        self._hurry.set()
        try:
            await asyncio.shield(self._last)
        finally:
            self._hurry.clear()

    def heed(self) -> None:
        """Raise what the first to fail has raised, if one has by now."""
        if self._last is not None and self._last.done():
            self._last.result()

    async def _after(self, earlier: asyncio.Task[None] | None, write: Callable[[], Awaitable[None]]) -> None:
        if earlier is None or earlier.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEAD_START_SECONDS):
                    await self._hurry.wait()
        if earlier is not None:
            await earlier
        await write()
