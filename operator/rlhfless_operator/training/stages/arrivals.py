"""The groups that a learner finds if it follows preparation, and those that it can still expect."""

import math
import time

import numpy as np

from rlhfless_functions.api import JournalledPiece
from rlhfless_operator.planner.step.generation import GroupForecast
from rlhfless_operator.planner.step.pace import LearnerPace, begins_unknown
from rlhfless_operator.training.stages.piece_journal import PieceJournal


class Arrivals:
    """The groups of a step as they come, from the moment it is made. It is asked a few times a second.

    Args:
        forecast: of the step's groups; None if nothing is known of them.
        journal: receives the groups.
        groups: number of the step's groups.
    """

    def __init__(self, forecast: GroupForecast | None, journal: PieceJournal, groups: int) -> None:
        self._knows, self._groups = forecast is not None, groups
        forecast = forecast or GroupForecast({}, {}, 0.0)
        self._ready = forecast.ready
        self.time_price = forecast.time_price
        """Instance-seconds of the learner that a second of the step is worth."""
        self._learning = forecast.learning
        self._journal = journal
        self.folder = journal.folder
        """Folder of the journal."""
        self._began = time.monotonic()

    @property
    def last_seconds(self) -> float:
        """Time at which the last group of all is expected, in seconds into the step."""
        return max(self._ready.values(), default=0.0)

    @property
    def pieces(self) -> int:
        """Number of pieces so far."""
        return len(self._journal.pieces)

    def suffice_in(self, pace: LearnerPace, done: int) -> float:
        """Return the seconds until a learner that has finished so many pieces should be asked for; 0 for now."""
        pieces = list(self._journal.pieces)
        if not self._knows:
            return 0.0 if begins_unknown(len(_prompts(pieces)), self._groups) else math.inf
        backlog = sum(self._learning.get(prompt, 0.0) for prompt in _prompts(pieces[done:]))
        coming = self._ready.keys() - _prompts(pieces)
        expected = np.array([self._ready[prompt] for prompt in coming], dtype=np.float64)
        work = np.array([self._learning[prompt] for prompt in coming], dtype=np.float64)
        now = time.monotonic() - self._began
        return pace.begins(now, backlog, expected, work) - now

    def are_late(self, pace: LearnerPace, done: int | None) -> bool:
        """Return whether to let a learner go that waits after so many pieces; None stands for one that does not
        wait."""
        pieces = list(self._journal.pieces)
        if done is None or done < len(pieces):
            return False
        coming = self._ready.keys() - _prompts(pieces)
        expected = np.array([self._ready[prompt] for prompt in coming], dtype=np.float64)
        # The gradients that an instance has accumulated end with it.
        again = sum(self._learning.get(prompt, 0.0) for prompt in _prompts(pieces))
        return pace.lets_go(time.monotonic() - self._began, expected, again)


def _prompts(pieces: list[JournalledPiece]) -> set[int]:
    return {sample.prompt for piece in pieces for sample in piece.samples}
