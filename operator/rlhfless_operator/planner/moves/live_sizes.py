"""The number of actors whose batches live, and the samples in the batch of each. Pure.

An actor opens for as many samples as the split expects in a batch, on average. Another opens whenever samples find no
place, as long as the job may have one. So no sample waits while an actor may open.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Batches:
    """The actors that a rollout asks for."""

    actors: int
    """Most actors."""
    places: int
    """Most samples in the batch of each."""
    samples: int
    """Samples in it on average: with more for each actor that there is, another one opens."""
    most: int | None = None
    """Most samples in it if lengths turn out to be shorter, for actors that open now; None if they are the places."""

    def sequences(self, group: int) -> int:
        """Return how many samples an actor that opens now may decode at a time, at least a group."""
        return max(self.places if self.most is None else self.most, group)

    def missing(self, unfinished: Mapping[int, int], there: int, *, left: int = 0) -> int:
        """Return how many actors open.

        Args:
            unfinished: unfinished samples of each version.
            there: number of actors.
            left: samples that found no place in any of them.
        """
        wanted = max(self._needed(unfinished), there + math.ceil(left / self.samples))
        return max(0, min(self.actors, wanted) - there)

    def room(self, unfinished: Mapping[int, int], there: int, group: int, *, may_open: bool) -> int:
        """Return how many samples an actor may have now.

        An actor may have an even part of all samples, which leaves work for actors that open later, and a group more.
        If no other actor opens, a group may wait in the instance for free places of its batch.

        Args:
            unfinished: unfinished samples of each version.
            there: number of actors that samples may join.
            group: samples of the largest group.
            may_open: whether another actor may open, or is being opened.
        """
        actors = max(1, min(self.actors, max(there, self._needed(unfinished))))
        most = max(self.places, group) + (0 if may_open else group)
        return min(most, math.ceil(sum(unfinished.values()) / actors) + group)

    def free(self, busy: int, room: int, *, answers: bool = True) -> int:
        """Return how many samples may join an actor.

        Args:
            busy: samples that it has. If they are more than its places, some wait in the instance.
            room: how many it may have.
            answers: whether its instance has said that it took in all that it was given. None wait in one that has not:
                it may stand still.
        """
        most = room if answers else min(room, self.places)
        return max(0, most - busy) if busy <= self.places else 0

    def _needed(self, unfinished: Mapping[int, int]) -> int:
        """Return how many actors all unfinished samples need. A batch has one version."""
        return sum(math.ceil(count / self.samples) for count in unfinished.values())
