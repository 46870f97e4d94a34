"""A clock of the test's own, and what the loop asks a platform for by it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rlhfless_functions.api import Preload, Stage, WeightsReference
from rlhfless_functions.settings import ModelSettings
from rlhfless_operator.planner.history import History
from rlhfless_operator.training.instances import capacity as capacity_module
from rlhfless_operator.training.instances.capacity import Capacity

PRELOAD = Preload(model=ModelSettings(source="m"), weights=WeightsReference(version=0, uri="m"))


class Timeline:
    """A clock that `sleep` moves on, and the holds that a platform was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keep_alive: float | None = None, **options: Any) -> None:
        self.now = 100.0
        self.holds: list[tuple[float, Stage, int]] = []
        self.preloads: list[Preload | None] = []
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self.history = History()
        self.capacity = Capacity(
            self,  # type: ignore[arg-type]
            dict.fromkeys(("generation", "preparation", "learning"), keep_alive),
            self.history,
            clock=lambda: self.now,
            **options,
        )
        monkeypatch.setattr(capacity_module.asyncio, "sleep", self._sleep)

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        self.holds.append((self.now - 100, stage, count))
        self.preloads.append(preload)

    async def _sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self._sleepers.append((self.now + seconds, event))
        await event.wait()

    async def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            # Whoever was told to go on does so before the clock does.
            for _ in range(5):
                await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0)
            due = [sleeper for sleeper in self._sleepers if sleeper[0] <= end]
            if not due:
                self.now = end
                return
            first = min(due, key=lambda sleeper: sleeper[0])
            self._sleepers.remove(first)
            self.now = max(self.now, first[0])
            first[1].set()

    def counts(self, stage: Stage) -> list[tuple[float, int]]:
        return [(round(at, 6), count) for at, of_stage, count in self.holds if of_stage == stage]


MakeTimeline = Callable[..., Timeline]
