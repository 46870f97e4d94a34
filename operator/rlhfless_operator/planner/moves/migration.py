"""Where unfinished samples are, and when they go elsewhere: one state machine fed with events.

A chosen cut, a lost instance and a repack are one thing: the samples of an actor that are not finished, with the tokens
that they have, become somebody else's. When that is worth it is up to a rule (migration_rules.py).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless_operator.planner.latency.linear import LinearLatency

Key = tuple[int, int]
"""(prompt, index) of a sample."""


@dataclass(slots=True)
class Unfinished:
    """A sample that an actor holds."""

    prompt_tokens: int
    tokens: int = 0
    """Response tokens so far."""
    remaining: float = 0.0
    """Response tokens still expected, as of the last time that a rule was due."""
    risk: float = 0.0
    """Chance that it is a runaway and goes on to the longest response, as of then."""
    assessed_at: int = -1
    """Its tokens then."""
    moves: int = 0
    """How often it has been moved by choice."""

    @property
    def context(self) -> int:
        """Tokens whose keys and values an instance must have to go on with it."""
        return self.prompt_tokens + self.tokens


@dataclass
class Actor:
    """What is known of an actor."""

    name: str
    samples: dict[Key, Unfinished] = field(default_factory=dict)
    total: int = 0
    """Samples that it was given at first."""
    finished: int = 0
    peak_context: int = 0
    """Most tokens that its samples have had at a time."""

    @property
    def rounds(self) -> float:
        """Decode steps to its last response."""
        return max((sample.remaining for sample in self.samples.values()), default=0.0)

    @property
    def risk(self) -> float:
        """Runaways among its samples: an expected number."""
        return sum(sample.risk for sample in self.samples.values())

    @property
    def least_tokens(self) -> int:
        """Tokens of its shortest response so far."""
        return min((sample.tokens for sample in self.samples.values()), default=0)

    @property
    def context(self) -> int:
        """Tokens in the context of its samples."""
        return sum(sample.context for sample in self.samples.values())

    def work(self, latency: LinearLatency) -> float:
        """Seconds that its samples add to its remaining time besides the steps' constant."""
        return sum(latency.sequence_work(sample.context, sample.remaining) for sample in self.samples.values())


@dataclass(frozen=True, slots=True)
class Move:
    """Unfinished samples that become another actor's. A source that keeps none is released."""

    source: str
    samples: tuple[Key, ...]
    destination: str | None
    """A running actor, or None for a new one."""


class Rule(Protocol):
    """When to cut which actors. A rule keeps what it must remember of one step in itself."""

    def due(self, actors: Collection[Actor], now: float) -> bool:
        """Whether there may be anything to decide at `now`: a cheap question, asked before what is expected of each
        sample is worked out."""
        ...

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Moves that are worth it at `now`, seconds; `actors` have unfinished samples."""
        ...


class Migration:
    """Follows the actors of one step.

    Args:
        rule: decides on chosen cuts; None for never.
        outlook: (sample, tokens so far) → response tokens still expected, and the chance of a runaway.
        max_moves: how often one sample may be moved by choice. Lost actors do not count.
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
        """An actor has been given samples that no other actor holds."""
        view = self._actors.setdefault(actor, Actor(actor))
        for key, tokens in prompt_tokens.items():
            view.samples[key] = Unfinished(tokens)
        view.total += len(prompt_tokens)

    def progressed(self, actor: str, tokens: Mapping[Key, int]) -> None:
        """Response tokens that some of an actor's samples have by now; of samples it no longer holds, nothing."""
        view = self._actors.get(actor)
        if view is None:
            return
        for key, count in tokens.items():
            sample = view.samples.get(key)
            if sample is not None:
                sample.tokens = count
        view.peak_context = max(view.peak_context, view.context)

    def finished(self, actor: str, keys: Sequence[Key]) -> None:
        """Some of an actor's samples are complete; an actor with none left is forgotten."""
        view = self._actors.get(actor)
        if view is None:
            return
        for key in keys:
            if view.samples.pop(key, None) is not None:
                view.finished += 1
        if not view.samples:
            del self._actors[actor]

    def lost(self, actor: str) -> Move | None:
        """An actor's stream has ended too early: what it held needs a new actor. None if it held nothing."""
        view = self._actors.pop(actor, None)
        return Move(actor, tuple(view.samples), None) if view is not None and view.samples else None

    def decide(self, now: float) -> list[Move]:
        """The moves to make now. They take effect in this machine when `moved` is called."""
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
        """Work out what is expected of every sample by now."""
        for actor in self._actors.values():
            for key, sample in actor.samples.items():
                if sample.assessed_at != sample.tokens:
                    sample.remaining, sample.risk = self._outlook(key, sample.tokens)
                    sample.assessed_at = sample.tokens

    def moved(self, move: Move, destination: str) -> None:
        """A chosen move has been made."""
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
        """A new actor goes on with a lost one's samples, (prompt tokens, response tokens kept) each."""
        view = self._actors.setdefault(actor, Actor(actor))
        for key, (prompt_tokens, tokens) in samples.items():
            view.samples[key] = Unfinished(prompt_tokens, tokens)
        view.total += len(samples)
