"""Environments whose answers depend on the conversation alone, and come when a test wants them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rlhfless_functions.environments.episodes import Observation, Outcome, Turn

TURNS = 3
"""Most turns of the policy in an episode."""


def sampled_turns(turn: Turn) -> int:
    """The number of turns that the policy has had."""
    bounds = [0, *(place for span in turn.given for place in span), len(turn.response)]
    return sum(end > start for start, end in zip(bounds[::2], bounds[1::2], strict=True))


def answer_to(turn: Turn, head: int = 2) -> Observation:
    """Two tokens before the first turn and up to four after each other; the episode ends by a limit of either kind."""
    numbers = random.Random(repr((turn.sample, list(turn.response))))
    turns = sampled_turns(turn)
    tokens = [numbers.randrange(2, 60) for _ in range(numbers.randint(1, 4) if turn.response else head)]
    full = len(tokens) >= turn.room
    if turn.truncated or full or turns == TURNS:
        outcome = Outcome(float(turns), turns, "maxTokens" if turn.truncated or full else "answered")
        return Observation(turn.sample, done=True, outcome=outcome)
    return Observation(turn.sample, tokens)


@dataclass
class Game:
    """Environments that answer in an order and at times that a seed draws.

    Args:
        delay: most calls of `ready` until an answer comes.
        seed: of the delays.
    """

    delay: int = 0
    seed: int = 0
    answer: Callable[[Turn], Observation] = answer_to
    turns: list[Turn] = field(default_factory=list)
    closed: int = 0
    _due: list[tuple[int, Turn]] = field(default_factory=list)
    _calls: int = 0

    def __post_init__(self) -> None:
        self._numbers = random.Random(self.seed)

    def submit(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._due.append((self._calls + self._numbers.randint(0, self.delay), turn))

    def ready(self, wait_seconds: float) -> list[Observation]:
        self._calls += 1
        due = [turn for at, turn in self._due if at < self._calls]
        self._due = [(at, turn) for at, turn in self._due if at >= self._calls]
        self._numbers.shuffle(due)
        return [self.answer(turn) for turn in due]

    @property
    def unanswered(self) -> list[Turn]:
        """The turns whose answers have not been fetched."""
        return [turn for _, turn in self._due]

    def close(self) -> None:
        self.closed += 1
