"""The state machine of a step's unfinished samples: it is fed with events, and says which samples go elsewhere.

A chosen cut, a lost instance and a repack are one thing: an actor's unfinished samples, with their tokens so far, go to
another actor. A rule (`rules`) decides when that is worth its cost.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless_operator.planner.latency.linear import LinearLatency

Key = tuple[int, int]
"""(prompt, index) of a sample."""
MOST_GROWTH = 2
"""Most samples that moves gather on an actor at a time, as a multiple of the largest share. Engines reserve memory for
them."""


@dataclass(slots=True)
class Unfinished:
    """A sample that an actor holds."""

    prompt_tokens: int
    tokens: int = 0
    """Response tokens so far."""
    remaining: float = 0.0
    """Response tokens still expected, as of the last assessment."""
    risk: float = 0.0
    """Chance that it is a runaway and goes on to the longest response, as of the last assessment."""
    assessed_at: int = -1
    """Its tokens at the last assessment."""
    moves: int = 0
    """Number of times that it was moved by choice."""

    @property
    def context(self) -> int:
        """Number of tokens whose keys and values an instance needs to go on with it."""
        return self.prompt_tokens + self.tokens


@dataclass
class Actor:
    """An actor with its unfinished samples."""

    name: str
    samples: dict[Key, Unfinished] = field(default_factory=dict)
    total: int = 0
    """Number of samples that it was given, less those moved away."""
    finished: int = 0
    peak_context: int = 0
    """Most tokens that its samples have had at a time."""

    @property
    def rounds(self) -> float:
        """Decode steps to its last response."""
        return max((sample.remaining for sample in self.samples.values()), default=0.0)

    @property
    def risk(self) -> float:
        """Expected number of runaways among its samples."""
        return sum(sample.risk for sample in self.samples.values())

    @property
    def least_tokens(self) -> int:
        """Tokens of its shortest response so far."""
        return min((sample.tokens for sample in self.samples.values()), default=0)

    @property
    def context(self) -> int:
        """Tokens in the contexts of all its samples."""
        return sum(sample.context for sample in self.samples.values())

    def work(self, latency: LinearLatency) -> float:
        """Return the seconds that its samples add to its remaining time, besides the steps' constant."""
        return sum(latency.sequence_work(sample.context, sample.remaining) for sample in self.samples.values())


@dataclass(frozen=True, slots=True)
class Move:
    """Unfinished samples that go to another actor. A source that keeps none is released."""

    source: str
    samples: tuple[Key, ...]
    destination: str | None
    """A running actor, or None for a new one."""


class Rule(Protocol):
    """A rule that decides when to cut which actors. It keeps its own state of one step."""

    def due(self, actors: Collection[Actor], now: float) -> bool:
        """Return whether there may be anything to decide at `now`.

        It must be cheap: it is asked before the samples are assessed.
        """
        ...

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Return the moves that are worth their cost at `now`, in seconds; `actors` have unfinished samples."""
        ...


class Migration:
    """The actors of one step, with their unfinished samples and the moves between them.

    Args:
        rule: decides on chosen cuts; None for no cuts.
        outlook: (sample, tokens so far) → response tokens still expected, and the chance of a runaway.
        max_moves: most times that a sample is moved by choice. Lost actors do not count.
    """

    def __init__(
        self, rule: Rule | None, outlook: Callable[[Key, int], tuple[float, float]], *, max_moves: int = 2
    ) -> None:
        if max_moves < 0:
            raise ValueError(f"max_moves is {max_moves}: a sample moves 0 times or more")
        self._rule = rule
        self._outlook = outlook
        self._max_moves = max_moves
        self._actors: dict[str, Actor] = {}

    @property
    def actors(self) -> Mapping[str, Actor]:
        """Actors that hold unfinished samples, by name."""
        return self._actors

    def assigned(self, actor: str, prompt_tokens: Mapping[Key, int]) -> None:
        """Record that an actor has been given samples that no other actor holds."""
        view = self._actors.setdefault(actor, Actor(actor))
        for key, tokens in prompt_tokens.items():
            view.samples[key] = Unfinished(tokens)
        view.total += len(prompt_tokens)

    def progressed(self, actor: str, tokens: Mapping[Key, int]) -> None:
        """Record the response tokens of some of an actor's samples. Samples that it no longer holds are ignored."""
        view = self._actors.get(actor)
        if view is None:
            return
        for key, count in tokens.items():
            sample = view.samples.get(key)
            if sample is not None:
                sample.tokens = count
        view.peak_context = max(view.peak_context, view.context)

    def finished(self, actor: str, keys: Sequence[Key]) -> None:
        """Record that some of an actor's samples are complete. An actor with none left is removed."""
        view = self._actors.get(actor)
        if view is None:
            return
        for key in keys:
            if view.samples.pop(key, None) is not None:
                view.finished += 1
        if not view.samples:
            del self._actors[actor]

    def lost(self, actor: str) -> Move | None:
        """Remove an actor whose stream ended too early, and return the move of its samples to a new actor.

        None if it held no samples.
        """
        view = self._actors.pop(actor, None)
        return Move(actor, tuple(view.samples), None) if view is not None and view.samples else None

    def decide(self, now: float) -> list[Move]:
        """Return the moves to make now. They take effect here when `moved` is called."""
        actors = self._actors.values()
        if self._rule is None or not actors or not self._rule.due(actors, now):
            return []
        self.assess()
        movable = self._max_moves
        return [
            move
            for move in self._rule.decide(list(actors), now)
            if all(self._actors[move.source].samples[key].moves < movable for key in move.samples)
        ]

    def assess(self) -> None:
        """Update the remaining tokens and the risk of every sample that has new tokens."""
        for actor in self._actors.values():
            for key, sample in actor.samples.items():
                if sample.assessed_at != sample.tokens:
                    sample.remaining, sample.risk = self._outlook(key, sample.tokens)
                    sample.assessed_at = sample.tokens

    def moved(self, move: Move, destination: str) -> None:
        """Record that a chosen move has been made."""
        source = self._actors[move.source]
        target = self._actors.setdefault(destination, Actor(destination))
        for key in move.samples:
            sample = source.samples.pop(key)
            sample.moves += 1
            target.samples[key] = sample
            target.total += 1
        source.total -= len(move.samples)
        if not source.samples:
            del self._actors[move.source]
        target.peak_context = max(target.peak_context, target.context)

    def resumed(self, actor: str, samples: Mapping[Key, tuple[int, int]]) -> None:
        """Record that a new actor goes on with a lost one's samples: (prompt tokens, response tokens kept) each."""
        view = self._actors.setdefault(actor, Actor(actor))
        for key, (prompt_tokens, tokens) in samples.items():
            view.samples[key] = Unfinished(prompt_tokens, tokens)
        view.total += len(samples)
