"""The episode of a simulated response: its turns, and the moments at which its environment answers."""

from itertools import accumulate

from rlhfless_functions.data.turns import TracedResponse, turns_of, wait_of
from rlhfless_operator.planner.acting import Acting


class Episode:
    """The progress of an episode. Its environment is asked before the first turn and after each.

    Args:
        traced: the response in its trace.
    """

    def __init__(self, traced: TracedResponse) -> None:
        spans = turns_of(traced)
        self._turn_ends = list(accumulate(end - start for start, end in spans))
        self._gives = [start - end for (start, _), end in zip(spans, [0, *(end for _, end in spans)], strict=False)]
        self._wait_seconds = wait_of(traced)
        self.acting = Acting(traced.away_seconds, traced.given)
        """All of its time with the environment, and all that it is given."""
        self._answers = 0
        """Answers of its environment that have come."""
        self.back_at: float | None = None
        """Moment at which its environment answers; None while it was not asked."""
        self.kept_by = ""
        """Name of the instance that has the keys and values of all but what was given last."""

    @property
    def awaits(self) -> bool:
        """Whether an answer must come before the next token."""
        return self.back_at is not None or self._answers == 0

    @property
    def is_over(self) -> bool:
        """Whether the last answer has come."""
        return self._answers > len(self._turn_ends)

    @property
    def given(self) -> int:
        """Tokens that its environment has given."""
        return sum(self._gives[: self._answers])

    @property
    def given_last(self) -> int:
        """Those of them that its newest answer has."""
        return self._gives[self._answers - 1] if 0 < self._answers <= len(self._gives) else 0

    @property
    def turn_end(self) -> int:
        """Sampled tokens at the end of the present turn."""
        return self._turn_ends[self._answers - 1]

    @property
    def turn_begin(self) -> int:
        """Sampled tokens at the beginning of the present turn."""
        return self._turn_ends[self._answers - 2] if self._answers > 1 else 0

    def ask(self, now: float) -> float:
        """Ask the environment, unless it has been; return the moment of its answer."""
        if self.back_at is None:
            self.back_at = now + self._wait_seconds
        return self.back_at

    def answer(self) -> None:
        """Take the answer."""
        self._answers += 1
        self.back_at = None
