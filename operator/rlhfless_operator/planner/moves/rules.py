"""Rules that decide when migration is worth its cost: those of RLHFless and Laminar, and ours."""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.latency.linear import Latency, LinearLatency
from rlhfless_operator.planner.moves.migration import Actor, Key, Move

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass
class ActorRatio:
    """RLHFless: an actor that has finished the share τ of its samples is cut (arXiv 2602.22718, cut-and-migrate).

    Each of its unfinished samples goes to the actor with the most free slots. If too few slots are free, all stay.
    """

    ratio: float
    slots: int
    """Sequences that an actor decodes at a time."""

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def due(self, actors: Collection[Actor], now: float) -> bool:
        """Return whether an actor is past τ."""
        return len(actors) > 1 and any(actor.finished >= self.ratio * actor.total for actor in actors)

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Cut every actor past τ, the one with the fewest samples first, while others have room."""
        moves = []
        free = {actor.name: self.slots - len(actor.samples) for actor in actors}
        receivers: set[str] = set()
        for actor in sorted(actors, key=lambda each: len(each.samples)):
            if actor.name in receivers or actor.finished < self.ratio * actor.total:
                continue
            others = {name: room for name, room in free.items() if name != actor.name and room > 0}
            if sum(others.values()) < len(actor.samples):
                continue
            dealt: dict[str, list[Key]] = {}
            for key in actor.samples:
                name = max(others, key=lambda each: others[each])
                dealt.setdefault(name, []).append(key)
                others[name] -= 1
            free.update(others)
            del free[actor.name]
            receivers.update(dealt)
            moves += [Move(actor.name, tuple(keys), name) for name, keys in dealt.items()]
        return moves


@dataclass
class Repack:
    """Laminar: every few seconds, each actor whose load falls is emptied into the fullest one that has room."""

    roofline_batch: int
    """Number of requests below which reading the weights bounds a decode step."""
    kv_tokens: float = math.inf
    period: float = 5.0
    last: float = 0.0

    def due(self, actors: Collection[Actor], now: float) -> bool:
        """Return whether a period has passed."""
        return len(actors) > 1 and now - self.last >= self.period

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Repack once a period."""
        if not self.due(actors, now):
            return []
        self.last = now
        idle = [a for a in actors if a.context < a.peak_context and len(a.samples) < self.roofline_batch]
        load = {actor.name: len(actor.samples) for actor in idle}
        used = {actor.name: actor.context for actor in idle}
        moves = []
        for actor in sorted(idle, key=lambda each: each.context):
            fitting = [
                name
                for name in load
                if name != actor.name
                and load[name] + len(actor.samples) <= self.roofline_batch
                and used[name] + actor.context <= self.kv_tokens
            ]
            if actor.name not in load or not fitting:
                continue
            fullest = max(fitting, key=lambda name: used[name])
            if used[fullest] < used[actor.name] or load[actor.name] != len(actor.samples):
                continue
            load[fullest] += len(actor.samples)
            used[fullest] += actor.context
            del load[actor.name], used[actor.name]
            moves.append(Move(actor.name, tuple(actor.samples), fullest))
        return moves


@dataclass
class WaitingLearner:
    """A learner that needs the GPUs of actors, and learns from groups while the others are generated.

    Generation may end later at no cost to the step, as long as the learner ends after it in any case.
    """

    actors: int
    """Most actors beside which it has its GPUs."""
    seconds: float
    """Seconds of learning, its start included, without the groups that are prepared last."""
    earliest: float
    """Moment before which it does not begin, in seconds into the step."""
    began: float | None = None
    """Moment at which it could begin; None while it waits."""

    def seconds_left(self, actors: int, now: float) -> float:
        """Return the seconds from `now` for which it learns at least, beside so many actors."""
        if self.began is None and now >= self.earliest and actors <= self.actors:
            self.began = now
        began = max(now, self.earliest) if self.began is None else self.began
        return max(0.0, began + self.seconds - now)


@dataclass
class Saving:
    """Ours: an actor is emptied when that saves more instance-seconds than it costs.

    Two actors with r and s ≤ r steps to go decode apart in step·(r + s) + work, and together in step·r + work. So to
    empty one saves step·s. It costs the prefill of the moved contexts and a pause. If the receiver must be cut too, it
    also costs the prefill of the receiver's contexts. The receiver ends later, and this delay is charged if it then
    ends after all others. A receiver that may hold an undetected runaway is likely to be the last.
    """

    latency: Latency
    slots: int
    kv_tokens: float = math.inf
    longest: int = 0
    """Length at which runaways end; 0 if there are none."""
    time_price: float = 1.0
    """Instance-seconds that a second of the step is worth."""
    pause_seconds: float = 0.5
    """Seconds until samples that were taken back decode again: their publication, and the read of it."""
    restarts_receiver: bool = False
    """Whether the receiver computes its contexts again, as where an instance is cut to be given more."""
    hysteresis: float = 1.0
    """Ratio of the cost by which the saving must exceed the cost."""
    period: float = 1.0
    """Least seconds between two decisions."""
    last: float = -math.inf
    learner: WaitingLearner | None = None
    """The learner of the step, if it needs GPUs that actors leave: its end counts as the end of another actor."""

    def due(self, actors: Collection[Actor], now: float) -> bool:
        """Return whether a period has passed and any two actors fit on one instance."""
        if now - self.last < self.period or len(actors) < 2:
            return False
        return sum(heapq.nsmallest(2, (len(actor.samples) for actor in actors))) <= self.slots

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Empty actors while that pays, the one with the least to move first."""
        if not self.due(actors, now):
            return []
        self.last = now
        fleet = _Fleet(actors, _line_of(self.latency, actors), self.longest)
        horizon = float(fleet.seconds().max())
        if self.learner is not None:
            left = self.learner.seconds_left(len(actors), now)
            # Where all samples do not fit beside the learner, it waits for the last response.
            if self.learner.began is not None or self._fit(fleet, self.learner.actors):
                horizon = max(horizon, left)
        receivers = np.zeros(len(actors), dtype=bool)
        moves = []
        for source in np.argsort(fleet.context, kind="stable").tolist():
            if receivers[source]:
                continue
            fits = fleet.present & (fleet.samples + fleet.samples[source] <= self.slots)
            fits &= fleet.full_context + fleet.full_context[source] <= self.kv_tokens
            fits[source] = False
            if not fits.any():
                continue
            cost = self._cost(fleet, source, receivers)
            gain = np.where(fits, self._gain(fleet, source, horizon, cost), 0.0)
            best = int(gain.argmax())
            if gain[best] <= 0:
                continue
            fleet.join(source, best, float(cost[best]))
            horizon = max(horizon, float(fleet.seconds()[best]))
            receivers[best] = True
            moves.append(Move(actors[source].name, tuple(actors[source].samples), actors[best].name))
        return moves

    def _fit(self, fleet: "_Fleet", actors: int) -> bool:
        """Return whether so many actors have room for all samples."""
        slots, kv_tokens = actors * self.slots, actors * self.kv_tokens if actors else 0
        return bool(fleet.samples.sum() <= slots and fleet.full_context.sum() <= kv_tokens)

    def _cost(self, fleet: "_Fleet", source: int, receivers: Flags) -> Floats:
        """Return the seconds that each actor loses as the receiver [actors]; a receiver is restarted only once."""
        own = self.pause_seconds + (self.latency.prefill_token_seconds * fleet.context if self.restarts_receiver else 0)
        moved = self.latency.prefill_token_seconds * fleet.context[source]
        cost: Floats = moved + np.where(receivers, 0.0, own)
        return cost

    def _gain(self, fleet: "_Fleet", source: int, horizon: float, cost: Floats) -> Floats:
        """Return the instance-seconds that are gained if each actor is the receiver [actors]."""
        saving = fleet.step_seconds * np.minimum(fleet.rounds, fleet.rounds[source])
        later = np.maximum(0.0, fleet.seconds_with(source, cost) - horizon)
        gain: Floats = saving - (1 + self.hysteresis) * cost - self.time_price * later
        return gain


def seconds_left(actors: Sequence[Actor], latency: Latency, longest: int) -> float:
    """Return the expected seconds until the last of these actors ends; 0 if there is none.

    Args:
        actors: with assessed samples.
        longest: length at which runaways end.
    """
    return float(_Fleet(actors, _line_of(latency, actors), longest).seconds().max()) if actors else 0.0


def ends_of_groups(actors: Sequence[Actor], latency: Latency) -> dict[int, float]:
    """Return the expected seconds until each group is complete of which these actors have samples, by prompt.

    Args:
        actors: with assessed samples.
    """
    ends: dict[int, float] = {}
    if not actors:
        return ends
    line = _line_of(latency, actors)
    for actor in actors:
        pace = line.step_seconds + actor.work(line) / max(1.0, actor.rounds)
        for (prompt, _), sample in actor.samples.items():
            ends[prompt] = max(ends.get(prompt, 0.0), pace * sample.remaining)
    return ends


class _Fleet:
    """The actors as columns: the work left of each, updated with every move."""

    def __init__(self, actors: Sequence[Actor], latency: LinearLatency, longest: int) -> None:
        self.step_seconds = latency.step_seconds
        self.rounds: Floats = np.array([actor.rounds for actor in actors])
        self._worst: Floats = np.maximum(self.rounds, [float(longest - actor.least_tokens) for actor in actors])
        self._risk: Floats = np.array([actor.risk for actor in actors])
        self._work: Floats = np.array([actor.work(latency) for actor in actors])
        self.context: Floats = np.array([float(actor.context) for actor in actors])
        to_come = [sum(sample.remaining for sample in actor.samples.values()) for actor in actors]
        self.full_context: Floats = self.context + to_come
        self.samples: Floats = np.array([float(len(actor.samples)) for actor in actors])
        self.present: Flags = np.ones(len(actors), dtype=bool)

    def seconds(self) -> Floats:
        """Return the seconds to the end of each actor [actors]."""
        return self._seconds(self.rounds, self._worst, self._risk, self._work)

    def seconds_with(self, source: int, cost: Floats) -> Floats:
        """Return the seconds to the end of each actor if it receives the samples of `source` at a cost [actors]."""
        rounds = np.maximum(self.rounds, self.rounds[source])
        worst = np.maximum(self._worst, self._worst[source])
        return self._seconds(rounds, worst, self._risk + self._risk[source], self._work + self._work[source] + cost)

    def join(self, source: int, target: int, cost: float) -> None:
        """Give all samples of one actor to another."""
        self.rounds[target] = max(self.rounds[target], self.rounds[source])
        self._worst[target] = max(self._worst[target], self._worst[source])
        self._risk[target] += self._risk[source]
        self._work[target] += self._work[source] + cost
        self.context[target] += self.context[source]
        self.full_context[target] += self.full_context[source]
        self.samples[target] += self.samples[source]
        self.present[source] = False

    def _seconds(self, rounds: Floats, worst: Floats, risk: Floats, work: Floats) -> Floats:
        result: Floats = self.step_seconds * (rounds + np.minimum(1.0, risk) * (worst - rounds)) + work
        return result


def _line_of(latency: Latency, actors: Sequence[Actor]) -> LinearLatency:
    """Return the linear model of rounds for the actors as they are.

    Together they would draft less. So to empty one saves at least as much as this model says.
    """
    samples = sum(len(actor.samples) for actor in actors)
    return latency.at(samples / len(actors), sum(actor.context for actor in actors) / max(1, samples))


def check_ratio(ratio: float) -> None:
    """Raise ValueError if the share τ is not a share."""
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio is {ratio}: τ is between 0 and 1; the nearest is {min(1, max(0, ratio))}")
