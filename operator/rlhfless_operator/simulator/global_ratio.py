"""The rule of a rival, RLHFuse: it moves samples once, when most of the step is done."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlhfless_operator.planner.moves.migration import Actor, Key, Move
from rlhfless_operator.planner.moves.rules import check_ratio


@dataclass
class GlobalRatio:
    """RLHFuse: once the share τ of all samples is finished, the tail is gathered on the fewest actors possible."""

    ratio: float
    slots: int
    """Sequences that an actor decodes at a time without slowing down much."""
    kv_tokens: float = math.inf
    samples: int = 0
    """Number of samples of the step."""
    done: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def due(self, actors: Collection[Actor], now: float) -> bool:
        """Return whether the tail has begun and is not gathered yet."""
        left = sum(len(actor.samples) for actor in actors)
        return not self.done and len(actors) > 1 and left <= (1 - self.ratio) * self.samples

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Gather the tail, once."""
        if not self.due(actors, now):
            return []
        self.done = True
        left = sum(len(actor.samples) for actor in actors)
        needed = max(
            math.ceil(left / self.slots),
            math.ceil(sum(s.context + s.remaining for a in actors for s in a.samples.values()) / self.kv_tokens),
            1,
        )
        ranked = sorted(actors, key=lambda each: -len(each.samples))
        kept = {actor.name: len(actor.samples) for actor in ranked[:needed]}
        moves: list[Move] = []
        for actor in ranked[needed:]:
            dealt: dict[str, list[Key]] = {}
            for key in actor.samples:
                name = min(kept, key=lambda each: kept[each])
                kept[name] += 1
                dealt.setdefault(name, []).append(key)
            moves += [Move(actor.name, tuple(keys), name) for name, keys in dealt.items()]
        return moves
