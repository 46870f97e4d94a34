"""The instances of a stage that rollouts, live actors and evaluations use at the same time, and the actors that have or
await one.

There are as many instances as the largest plan under way has actors. When an actor is done, its instance goes to the
next actor that waits, of the earliest step first.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Actor = TypeVar("Actor")


@dataclass(eq=False)
class RolloutPart:
    """The part of a stage's instances that one rollout has."""

    step: int
    actors: int
    """Number of instances in its plan."""
    left: int = field(init=False)
    """Number of actors that have work left, with or without an instance."""
    at_work: int = 0
    """Number of actors that have an instance."""

    def __post_init__(self) -> None:
        self.left = self.actors


class StageInstances(Generic[Actor]):
    """The rollouts that use a stage, and the actors that wait for one of its instances."""

    def __init__(self) -> None:
        self._parts: list[RolloutPart] = []
        self._waiting: list[tuple[int, int, RolloutPart, Actor]] = []
        self._numbers = itertools.count()

    # --- rollouts ---

    def begin(self, step: int, actors: int, left: int | None = None) -> RolloutPart:
        """Give a rollout its part, until `end`.

        Args:
            step: of the rollout, or of the evaluation.
            actors: most instances that it uses at a time.
            left: number of its actors that have work left; by default all.
        """
        part = RolloutPart(step, actors)
        part.left = actors if left is None else left
        self._parts.append(part)
        return part

    def end(self, part: RolloutPart) -> None:
        """Take a rollout's part back."""
        self._parts.remove(part)

    @property
    def has_room(self) -> bool:
        """Whether an instance is free that no actor waits for."""
        return self._left == 0 or self._left < self._most

    @property
    def wanted(self) -> int:
        """Number of instances with work."""
        return min(self._left, max(self._most, self._at_work))

    # --- actors ---

    def wait(self, part: RolloutPart, actor: Actor) -> None:
        """Let an actor of a rollout wait for an instance."""
        heapq.heappush(self._waiting, (part.step, next(self._numbers), part, actor))

    @property
    def waiting(self) -> int:
        """Number of actors that wait."""
        return len(self._waiting)

    def deal(self) -> tuple[RolloutPart, Actor] | None:
        """Give an instance to the next actor that waits, and return both; None if none is free or no actor waits."""
        if not self._waiting or self._at_work >= self._most:
            return None
        _, _, part, actor = heapq.heappop(self._waiting)
        part.at_work += 1
        return part, actor

    @property
    def _most(self) -> int:
        return max((part.actors for part in self._parts if part.left), default=0)

    @property
    def _left(self) -> int:
        return sum(part.left for part in self._parts)

    @property
    def _at_work(self) -> int:
        return sum(part.at_work for part in self._parts)
