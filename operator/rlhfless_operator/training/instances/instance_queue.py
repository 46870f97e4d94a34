"""Which actors have an instance of a stage, where several rollouts use the stage at the same time.

The instances are as many as the largest plan under way has actors. An instance that an actor is done with goes to the
next one that waits: to one of the earliest step first.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rlhfless_functions.api import Stage
from rlhfless_operator.platforms.base import Preload
from rlhfless_operator.training.instances.capacity import Capacity


@dataclass(eq=False)
class Part:
    """What one rollout has of a stage's instances."""

    queue: "InstanceQueue"
    step: int
    actors: int
    """Instances that its plan is made for."""
    left: int = field(init=False)
    """Actors that have anything left, with an instance or without."""
    at_work: int = 0
    """Actors that have an instance."""

    def __post_init__(self) -> None:
        self.left = self.actors

    async def turn(self) -> None:
        """Wait until an actor has an instance."""
        await self.queue.turn(self)

    def take(self) -> None:
        """One more actor has an instance, without waiting for it."""
        self.at_work += 1

    def give(self, left: int | None = None) -> None:
        """An actor needs its instance no longer.

        Args:
            left: the rollout's actors that still have anything left, if it is one fewer. A rollout that ends here has
                no say in how many instances there are.
        """
        self.at_work -= 1
        self.left = self.left if left is None else left
        self.queue.deal()

    async def has_left(self, actors: int) -> None:
        """So many of the rollout's actors have anything left."""
        self.left = actors
        await self.queue.hold()


@dataclass(order=True)
class _Waiting:
    step: int
    number: int
    part: Part = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class InstanceQueue:
    """The instances of one stage.

    Args:
        stage: which.
        capacity: asked for instances.
    """

    def __init__(self, stage: Stage, capacity: Capacity) -> None:
        self._stage = stage
        self._capacity = capacity
        self._parts: list[Part] = []
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._held = 0
        self._newest = 0
        self._coming: set[int] = set()
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether there is an instance that no actor has or waits for."""
        return self._left == 0 or self._left < self._most

    def has_room_for(self, actors: int) -> bool:
        """Whether so many actors more would all have an instance at once."""
        return self._left + actors <= max(self._most, actors)

    @asynccontextmanager
    async def part(self, step: int, actors: int, preload: Preload | None = None) -> AsyncIterator[Part]:
        """A rollout's part of the instances, while it goes on.

        Args:
            step: of the rollout, or of the evaluation.
            actors: most instances that it uses at a time.
            preload: what a fresh instance loads before it is ready.
        """
        part = Part(self, step, actors)
        self._parts.append(part)
        self._newest = max(self._newest, step)
        self._coming.discard(step)
        try:
            await self.hold(preload)
            yield part
        finally:
            self._parts.remove(part)
            self.deal()
        # After an error the run ends, and lets go of everything.
        await self.hold()

    async def turn(self, part: Part) -> None:
        """Wait until an actor of a rollout has an instance."""
        waiting = _Waiting(part.step, next(self._numbers), part, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiting)
        self.deal()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled():
                part.give()
            raise

    def deal(self) -> None:
        """Give the instances that are free to those that wait."""
        while self._waiting and self._at_work < self._most:
            waiting = heapq.heappop(self._waiting)
            if not waiting.turn.done():
                waiting.part.take()
                waiting.turn.set_result(None)
        self._changed.set()

    async def hold(self, preload: Preload | None = None) -> None:
        """Have as many instances as there is work for."""
        self._changed.set()
        count = min(self._left, max(self._most, self._at_work))
        if self._coming and self.has_room:
            # The next rollout uses them in a moment.
            count = max(count, self._held)
        if count != self._held or preload is not None:
            self._held = count
            await self._capacity.use(self._stage, count, preload)

    async def room_for(self, step: int, *, beside: int) -> None:
        """Wait until the rollout of step `beside` is under way, and an instance is left for the rollout of `step`.

        From now on an instance that is left is kept, until the rollout of `step` begins or `release` is called.
        """
        self._coming.add(step)
        while self._newest < beside or not self.has_room:
            self._changed.clear()
            await self._changed.wait()

    async def release(self, step: int) -> None:
        """The rollout of a step does not begin, or is complete."""
        self._coming.discard(step)
        await self.hold()

    @property
    def _most(self) -> int:
        return max((part.actors for part in self._parts if part.left), default=0)

    @property
    def _left(self) -> int:
        return sum(part.left for part in self._parts)

    @property
    def _at_work(self) -> int:
        return sum(part.at_work for part in self._parts)
