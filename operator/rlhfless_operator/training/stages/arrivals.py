"""What a learner that follows preparation finds there, and what it can still expect: asked a few times a second."""

import time

import numpy as np

from rlhfless_functions.api import JournalledPiece
from rlhfless_operator.planner.step.generation import GroupForecast
from rlhfless_operator.planner.step.pace import LearnerPace
from rlhfless_operator.training.stages.piece_journal import PieceJournal


class Arrivals:
    """A step's groups as they come, from when it is made.

    Args:
        forecast: of the step's groups.
        journal: in which they appear.
    """

    def __init__(self, forecast: GroupForecast, journal: PieceJournal) -> None:
        self._ready = forecast.ready
        self._learning = forecast.learning
        self._journal = journal
        self._began = time.monotonic()

    @property
    def last_seconds(self) -> float:
        """When the last group of all is expected, seconds into the step."""
        return max(self._ready.values())

    def suffice(self, pace: LearnerPace, done: int) -> bool:
        """Whether it is time for a learner that is done with so many pieces to begin."""
        pieces = list(self._journal.pieces)
        backlog = sum(self._learning.get(prompt, 0.0) for prompt in _prompts(pieces[done:]))
        coming = self._ready.keys() - _prompts(pieces)
        expected = np.array([self._ready[prompt] for prompt in coming], dtype=np.float64)
        work = np.array([self._learning[prompt] for prompt in coming], dtype=np.float64)
        now = time.monotonic() - self._began
        return pace.begins(now, backlog, expected, work) <= now

    def are_late(self, pace: LearnerPace, done: int | None) -> bool:
        """Whether a learner is to be let go that waits after so many pieces; None for one that does not wait."""
        pieces = list(self._journal.pieces)
        if done is None or done < len(pieces):
            return False
        coming = self._ready.keys() - _prompts(pieces)
        expected = np.array([self._ready[prompt] for prompt in coming], dtype=np.float64)
        # What an instance has accumulated ends with it.
        again = sum(self._learning.get(prompt, 0.0) for prompt in _prompts(pieces))
        return pace.lets_go(time.monotonic() - self._began, expected, again)


def _prompts(pieces: list[JournalledPiece]) -> set[int]:
    return {sample.prompt for piece in pieces for sample in piece.samples}
