"""Actors of several rollouts that wait for an instance of a stage; `planner/stage_instances.py` says who is next."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlhfless_functions.api import Preload, Stage
from rlhfless_operator.planner.stage_instances import RolloutPart, StageInstances
from rlhfless_operator.training.instances.capacity import Capacity


class Part:
    """The part of a stage's instances that one rollout has.

    Args:
        queue: of the stage.
        own: the rollout's account in it.
    """

    def __init__(self, queue: "InstanceQueue", own: RolloutPart) -> None:
        self._queue, self._own = queue, own
        self.step, self.actors = own.step, own.actors

    async def turn(self) -> None:
        """Wait until an actor has an instance."""
        await self._queue.turn(self._own)

    def give(self, left: int | None = None) -> None:
        """Give an instance back that an actor needs no longer.

        Args:
            left: actors of the rollout that still have samples left, if it is one fewer. A rollout that ends here has
                no say in how many instances there are.
        """
        self._own.at_work -= 1
        self._own.left = self._own.left if left is None else left
        self._queue.deal()

    @property
    def works(self) -> bool:
        """Whether an actor of the rollout has an instance."""
        return self._own.at_work > 0

    async def let_go(self) -> None:
        """Let the instances go that no actor needs now: more work is far away."""
        await self._queue.let_go()

    async def has_left(self, actors: int) -> None:
        """Say how many of the rollout's actors have anything left."""
        self._own.left = actors
        await self._queue.hold()
        self._queue.deal()


class InstanceQueue:
    """The instances of one stage.

    Args:
        stage: the stage.
        capacity: provides the instances.
    """

    def __init__(self, stage: Stage, capacity: Capacity) -> None:
        self._stage = stage
        self._capacity = capacity
        self._instances: StageInstances[asyncio.Future[None]] = StageInstances()
        self._held = 0

    @property
    def waiting(self) -> int:
        """Number of actors that wait for an instance."""
        return self._instances.waiting

    @asynccontextmanager
    async def part(
        self, step: int, actors: int, preload: Preload | None = None, *, left: int | None = None
    ) -> AsyncIterator[Part]:
        """Give a rollout its part of the instances, while it goes on.

        Args:
            step: of the rollout, or of the evaluation.
            actors: most instances that it uses at a time.
            preload: what a fresh instance loads before it is ready.
            left: number of instances that it needs now; by default as many as it uses at most.
        """
        own = self._instances.begin(step, actors, left)
        try:
            await self.hold(preload)
            yield Part(self, own)
        finally:
            self._instances.end(own)
            self.deal()
        # After an error the run ends, and releases everything.
        await self.hold()

    async def turn(self, part: RolloutPart) -> None:
        """Wait until an actor of a rollout has an instance."""
        turn = asyncio.get_running_loop().create_future()
        self._instances.wait(part, turn)
        self.deal()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                part.at_work -= 1
                self.deal()
            raise

    def deal(self) -> None:
        """Give the instances that are free to those that wait."""
        while (dealt := self._instances.deal()) is not None:
            part, turn = dealt
            if turn.done():
                # It waits no longer.
                part.at_work -= 1
            else:
                turn.set_result(None)

    async def hold(self, preload: Preload | None = None) -> None:
        """Hold as many instances as there is work for."""
        count = self._instances.wanted
        if count != self._held or preload is not None:
            self._held = count
            await self._capacity.use(self._stage, count, preload)

    async def let_go(self) -> None:
        """Let the instances go that have no work, unless they sleep then."""
        if not self._capacity.sleeps:
            await self._capacity.let_go(self._stage)
