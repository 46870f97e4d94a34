"""When migration is worth it: the rules of RLHFless, RLHFuse and Laminar, and ours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless_operator.policy.latency import LinearLatency
from rlhfless_operator.policy.migration import Actor, Key, Move


@dataclass
class ActorRatio:
    """RLHFless: an actor that has finished the share τ of its samples is cut (arXiv 2602.22718, cut-and-migrate).

    What is left goes, sample by sample, to the actor with the most free slots; with too few free slots it stays.
    """

    ratio: float
    slots: int
    """Sequences that an actor decodes at a time."""

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Cut every actor past τ while others have room."""
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
class GlobalRatio:
    """RLHFuse: once the share τ of all samples is finished, the tail is gathered on as few actors as hold it."""

    ratio: float
    slots: int
    """Sequences that an actor decodes at a time without slowing down much."""
    kv_tokens: float = math.inf
    samples: int = 0
    """Samples of the step."""
    done: bool = False

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Gather the tail, once."""
        left = sum(len(actor.samples) for actor in actors)
        if self.done or len(actors) < 2 or left > (1 - self.ratio) * self.samples:
            return []
        self.done = True
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


@dataclass
class Repack:
    """Laminar: every few seconds, actors on their way down are emptied, best-fit, into the fullest that has room."""

    roofline_batch: int
    """Requests below which a decode step is bound by the reading of the weights."""
    kv_tokens: float = math.inf
    period: float = 5.0
    last: float = 0.0

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Repack, once a period."""
        if now - self.last < self.period:
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
class Saving:
    """Ours: an actor is emptied when the instance-seconds that this saves exceed what it costs.

    Two actors with r and s ≤ r steps to go decode apart in step·(r + s) + work, together in step·r + work: emptying
    one saves step·s. It costs the prefill of the moved contexts (or their transfer), a pause, and, where the receiver
    must be cut too, the prefill of its contexts; and the receiver ends later, which is charged where it then ends
    after everybody else. Where it may hold a runaway that has not shown itself, it may well be the last.
    """

    latency: LinearLatency
    slots: int
    kv_tokens: float = math.inf
    longest: int = 0
    """Length at which runaways end; 0 where there are none."""
    time_price: float = 1.0
    """Instance-seconds that a second of the step is worth."""
    pause_seconds: float = 0.5
    """Lost by every chosen cut: closing a stream, a request, admission."""
    restarts_receiver: bool = True
    """Whether the receiver is cut as well, since an instance takes one request at a time."""
    transfer_token_seconds: float = math.inf
    """Seconds to ship a token's keys and values; prefill is done instead where that is faster."""
    hysteresis: float = 1.0
    """The saving must exceed the cost by this ratio of the cost."""
    period: float = 1.0
    """Least time between two looks."""
    last: float = -math.inf

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        """Empty actors, the one with the least to move first, while that pays."""
        if now - self.last < self.period or len(actors) < 2:
            return []
        self.last = now
        states = {actor.name: self._state(actor) for actor in actors}
        by_name = {actor.name: actor for actor in actors}
        horizon = max(self._seconds(state) for state in states.values())
        moves = []
        receivers: set[str] = set()
        for name in sorted(states, key=lambda each: states[each].context):
            if name in receivers:
                continue
            source = states[name]
            best, best_gain, best_cost = None, 0.0, 0.0
            for other, target in states.items():
                if other == name or target.samples + source.samples > self.slots:
                    continue
                if target.full_context + source.full_context > self.kv_tokens:
                    continue
                cost = self._cost(source, target, first=other not in receivers)
                gain = self._gain(source, target, horizon, cost)
                if gain > best_gain:
                    best, best_gain, best_cost = other, gain, cost
            if best is None:
                continue
            states[best] = states[best].joined(source, best_cost)
            horizon = max(horizon, self._seconds(states[best]))
            receivers.add(best)
            del states[name]
            moves.append(Move(name, tuple(by_name[name].samples), best))
        return moves

    def _cost(self, source: "_Remaining", target: "_Remaining", *, first: bool) -> float:
        """Seconds that the receiver loses."""
        cost = min(self.latency.prefill_token_seconds, self.transfer_token_seconds) * source.context
        if first:
            cost += self.pause_seconds
            if self.restarts_receiver:
                cost += self.latency.prefill_token_seconds * target.context
        return cost

    def _gain(self, source: "_Remaining", target: "_Remaining", horizon: float, cost: float) -> float:
        saving = self.latency.step_seconds * min(source.rounds, target.rounds)
        later = max(0.0, self._seconds(target.joined(source, cost)) - horizon)
        return saving - (1 + self.hysteresis) * cost - self.time_price * later

    def _state(self, actor: Actor) -> "_Remaining":
        to_come = sum(sample.remaining for sample in actor.samples.values())
        context, rounds = actor.context, actor.rounds
        return _Remaining(
            rounds,
            max(rounds, float(self.longest - actor.least_tokens)),
            actor.risk,
            actor.work(self.latency),
            context,
            context + to_come,
            len(actor.samples),
        )

    def _seconds(self, state: "_Remaining") -> float:
        rounds = state.rounds + min(1.0, state.risk) * (state.worst - state.rounds)
        return self.latency.step_seconds * rounds + state.work


@dataclass(frozen=True, slots=True)
class _Remaining:
    rounds: float
    worst: float
    risk: float
    work: float
    context: int
    full_context: float
    samples: int

    def joined(self, other: "_Remaining", cost: float = 0.0) -> "_Remaining":
        return _Remaining(
            max(self.rounds, other.rounds),
            max(self.worst, other.worst),
            self.risk + other.risk,
            self.work + other.work + cost,
            self.context + other.context,
            self.full_context + other.full_context,
            self.samples + other.samples,
        )


def _check_ratio(ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio is {ratio}: τ is between 0 and 1; the nearest is {min(1, max(0, ratio))}")
