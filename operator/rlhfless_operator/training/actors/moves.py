"""The move in progress: who is cut for it, and who has yet to end."""

import time
from collections.abc import Sequence

from rlhfless_operator.planner.moves.migration import Move

_LOOK_SHARE = 0.05
"""Most of the driver's time that may go into questions to the migration."""


class MoveInProgress:
    """At most one set of moves is carried out at a time: its actors are cut, and go on once all of them have ended."""

    def __init__(self) -> None:
        self._look_at = float("-inf")
        self._closing: set[str] = set()
        self.moves: Sequence[Move] = ()
        self.involved: list[str] = []
        """Actors that are cut for the moves."""

    def may_look(self, now: float) -> bool:
        """Whether it is time to ask again: nothing is being moved, and the last question was long enough ago."""
        return not self.involved and now >= self._look_at

    def look_again_at(self, at: float) -> None:
        """Ask no earlier than at this time."""
        self._look_at = at

    def begin(self, moves: Sequence[Move], asked_at: float, look_seconds: float) -> None:
        """These moves were decided on by a question that was asked at `asked_at`; without any, nothing begins.

        Args:
            look_seconds: least time until the next question.
        """
        # Questions that take long are asked less often.
        took = time.monotonic() - asked_at
        self.look_again_at(asked_at + max(look_seconds, took / _LOOK_SHARE))
        self.moves = moves
        self.involved = list(
            dict.fromkeys(name for move in moves for name in (move.source, move.destination) if name is not None)
        )
        self._closing = set(self.involved)

    def involves(self, actor: str) -> bool:
        """Whether an actor is cut and has not ended yet."""
        return actor in self._closing

    def ended(self, actor: str) -> bool:
        """An actor that was cut has ended; True if it was the last."""
        self._closing.discard(actor)
        return not self._closing

    def finish(self) -> None:
        """The moves are made."""
        self.moves, self.involved = (), []
