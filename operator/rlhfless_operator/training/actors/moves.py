"""The move in progress: the actors that are cut for it, and those that have yet to end."""

import time
from collections.abc import Sequence

from rlhfless_operator.planner.moves.migration import Move
from rlhfless_operator.training.actors.looks import pause_after


class MoveInProgress:
    """One set of moves at a time: its actors are cut, and resume once all of them have ended."""

    def __init__(self) -> None:
        self._look_at = float("-inf")
        self._closing: set[str] = set()
        self.moves: Sequence[Move] = ()
        self.involved: list[str] = []
        """Actors that are cut for the moves."""

    def may_look(self, now: float) -> bool:
        """Return whether to ask the migration again: no move is in progress, and the last question was long enough
        ago."""
        return not self.involved and now >= self._look_at

    def look_again_at(self, at: float) -> None:
        """Do not ask again before this time."""
        self._look_at = at

    def begin(self, moves: Sequence[Move], asked_at: float, look_seconds: float) -> None:
        """Begin these moves, which a question at `asked_at` decided on. Nothing begins if there are none.

        Args:
            look_seconds: least time until the next question.
        """
        # Questions that take long are asked less often.
        took = time.monotonic() - asked_at
        self.look_again_at(asked_at + max(look_seconds, pause_after(took)))
        self.moves = moves
        self.involved = list(
            dict.fromkeys(name for move in moves for name in (move.source, move.destination) if name is not None)
        )
        self._closing = set(self.involved)

    def involves(self, actor: str) -> bool:
        """Return whether an actor is cut and has not ended yet."""
        return actor in self._closing

    def ended(self, actor: str) -> bool:
        """Note that an actor that was cut has ended; return True if it was the last."""
        self._closing.discard(actor)
        return not self._closing

    def finish(self) -> None:
        """Note that the moves are made."""
        self.moves, self.involved = (), []
