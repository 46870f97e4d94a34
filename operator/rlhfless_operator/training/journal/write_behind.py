"""Writes in the background, in their order."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

HEAD_START_SECONDS = 0.05
"""Seconds by which urgent requests of the next stage go before writes: both need the interpreter and the disk."""


class WriteBehind:
    """Carries out writes one after another while its owner continues.

    After a failed write none is made any more: later ones may rest on it.
    """

    def __init__(self) -> None:
        self._last: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def add(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write this after all that was added before."""
        self._last = asyncio.create_task(self._after(self._last, write))

    async def done(self) -> None:
        """Wait for all writes, and raise the first error. Cancelling the wait stops no write."""
        if self._last is None:
            return
        self._hurry.set()
        try:
            await asyncio.shield(self._last)
        finally:
            self._hurry.clear()

    def heed(self) -> None:
        """Raise the first error of a write, if there is one by now."""
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
