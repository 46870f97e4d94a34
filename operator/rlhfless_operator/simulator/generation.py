"""One generation stage in discrete events: shares, cuts, failures, and who held what for how long."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.moves.migration import Key, Migration, Move, Rule
from rlhfless_operator.simulator.cluster_conditions import ClusterConditions
from rlhfless_operator.simulator.instance import Instance, Response


class FlushSchedule(Protocol):
    """When an instance tells of the responses that have ended; see `rlhfless_functions.generation.publishing`."""

    def group_completed(self) -> None:
        """All responses of a prompt that it holds have ended."""

    def due(self, now: float, pending: int) -> str:
        """`nothing`, or anything else if it tells of them now."""

    def flushed(self, now: float) -> None:
        """It has."""


@dataclass(frozen=True)
class Handling:
    """How a stage treats its instances besides the plan."""

    rule: Rule | None = None
    """When to cut; None for never."""
    max_moves: int = 2
    tick_seconds: float = 0.25
    """How often the rule is asked."""
    restarts_receiver: bool = False
    """Whether a running receiver is cut as well and computes its contexts again."""
    pause_seconds: float = 0.0
    """Further cost of a cut for a receiver; until all go on, no other actor is cut."""
    ready_seconds: float = 0.0
    """When instances are ready to work; their start before that is charged but delays no sample."""
    failures_per_hour: float = 0.0
    """Instances lost per instance-hour: crashes and spot reclaims."""
    flush_seconds: float = 5.0
    """Longest time that tokens are kept in an instance alone."""
    flushes: Callable[[int, float], FlushSchedule] | None = None
    """(responses, now) → when an instance that begins with so many tells of those that have ended; at once if None."""


@dataclass(slots=True)
class Held:
    """How long an instance was held, and how much of that it worked."""

    name: str
    begin: float
    end: float
    busy: float
    spot: bool = False
    """Whether on spot capacity."""


@dataclass
class GenerationRun:
    """What came of a stage."""

    ends: dict[Key, float] = field(default_factory=dict)
    """When each response ended."""
    held: list[Held] = field(default_factory=list)
    seconds: float = 0.0
    """When the last response ended."""
    moves: int = 0
    """Responses that were moved by choice."""
    lost: int = 0
    """Instances that were lost."""
    reclaimed: int = 0
    """Instances that were taken back with notice."""


def run_generation(
    shares: Sequence[Sequence[Response]],
    profile: InstanceProfile,
    outlook: Callable[[Key, int], tuple[float, float]],
    handling: Handling,
    *,
    max_batch: int,
    random: np.random.Generator | None = None,
    conditions: ClusterConditions | None = None,
    kv_gigabytes_per_token: float = 0.0,
) -> GenerationRun:
    """Run the shares, one instance each.

    Args:
        shares: responses in the order of admission; they are used up.
        outlook: (sample, tokens so far) → response tokens still expected and the chance of a runaway, for the rule.
        random: for failures.
        conditions: what the instances live in.
        kv_gigabytes_per_token: of keys and values, where prefixes are sent.
    """
    return _Stage(
        shares, profile, outlook, handling, max_batch, random, conditions or ClusterConditions(), kv_gigabytes_per_token
    ).run()


@dataclass
class _Untold:
    """What one request of an instance has finished and not told of yet."""

    schedule: FlushSchedule
    left_of_group: Counter[int]
    keys: list[Key] = field(default_factory=list)

    def ended(self, key: Key) -> None:
        self.keys.append(key)
        self.left_of_group[key[0]] -= 1
        if self.left_of_group[key[0]] == 0:
            self.schedule.group_completed()

    def take(self, now: float) -> list[Key]:
        keys, self.keys = self.keys, []
        self.schedule.flushed(now)
        return keys


class _Stage:
    def __init__(
        self,
        shares: Sequence[Sequence[Response]],
        profile: InstanceProfile,
        outlook: Callable[[Key, int], tuple[float, float]],
        handling: Handling,
        max_batch: int,
        random: np.random.Generator | None,
        conditions: ClusterConditions,
        kv_gigabytes_per_token: float,
    ) -> None:
        self._conditions = conditions
        self._kv_gigabytes_per_token = kv_gigabytes_per_token
        self._profile, self._handling, self._max_batch, self._random = profile, handling, max_batch, random
        self._start = profile.startup_seconds + profile.weight_load_seconds
        self._migration = Migration(handling.rule, outlook, max_moves=handling.max_moves)
        self._instances: dict[str, Instance] = {}
        self._begun: dict[str, float] = {}
        self._events: list[tuple[float, int, str]] = []
        self._mishaps: list[tuple[float, str, str]] = []
        self._nodes: dict[str, str] = {}
        self._spot: set[str] = set()
        self._opened = 0
        self._version: dict[str, int] = {}
        self._go_on_at = -math.inf
        self._untold: dict[str, _Untold] = {}
        self._result = GenerationRun()
        for share in shares:
            name = self._open(list(share), handling.ready_seconds)
            self._migration.assigned(name, {response.key: response.prompt_tokens for response in share})

    def run(self) -> GenerationRun:
        handling = self._handling
        tick = handling.ready_seconds + handling.tick_seconds if handling.rule is not None else math.inf
        while self._instances:
            end = self._events[0][0]
            mishap = self._mishaps[0][0] if self._mishaps else math.inf
            now = min(end, tick, mishap)
            if now == mishap:
                self._befall(*heapq.heappop(self._mishaps))
            elif now == end:
                _, version, name = heapq.heappop(self._events)
                if self._version.get(name) == version:
                    self._follow(name, now)
                    self._schedule(name)
            else:
                self._tick(now)
                tick = now + handling.tick_seconds
        return self._result

    def _open(self, responses: list[Response], ready: float) -> str:
        """An instance that is ready at `ready`, unless its start is a cold one."""
        name, conditions = f"actor-{self._opened}", self._conditions
        cold = (
            max(0.0, conditions.cold_seconds - self._profile.startup_seconds)
            if self._by_chance(conditions.cold_share)
            else 0
        )
        shared = conditions.shared_prefix_tokens if conditions.prefixes != "computed" else 0
        instance = Instance(
            name,
            self._profile.latency,
            ready + cold,
            max_batch=self._max_batch,
            kv_tokens=self._profile.kv_tokens,
            shared_tokens=shared,
            shared_seconds=conditions.prefix_seconds(
                self._profile.latency.prefill_token_seconds if shared else 0.0,
                self._kv_gigabytes_per_token,
                first=self._opened == 0,
            ),
        )
        instance.add(responses)
        self._instances[name] = instance
        self._request(name, instance.now)
        self._begun[name] = ready - self._start
        self._expose(name, instance.now)
        self._opened += 1
        self._schedule(name)
        return name

    def _expose(self, name: str, ready: float) -> None:
        """Draw when an instance, and a node that is new with it, will come to grief."""
        conditions = self._conditions
        self._threaten(ready, self._handling.failures_per_hour, "instance", name)
        if self._by_chance(conditions.spot_share):
            self._spot.add(name)
            self._threaten(ready, conditions.reclaims_per_hour, "reclaim", name)
        if conditions.node_instances:
            node = f"node-{self._opened // conditions.node_instances}"
            if node not in self._nodes.values():
                self._threaten(ready, conditions.node_failures_per_hour, "node", node)
            self._nodes[name] = node

    def _threaten(self, since: float, per_hour: float, kind: str, name: str) -> None:
        if per_hour > 0 and self._random is not None:
            heapq.heappush(self._mishaps, (since + self._random.exponential(3600 / per_hour), kind, name))

    def _by_chance(self, share: float) -> bool:
        return share > 0 and self._random is not None and bool(self._random.random() < share)

    def _schedule(self, name: str) -> None:
        instance = self._instances.get(name)
        if instance is None:
            return
        self._version[name] = self._version.get(name, 0) + 1
        heapq.heappush(self._events, (instance.next_end(), self._version[name], name))

    def _follow(self, name: str, now: float) -> None:
        """Bring an instance up to now; one with nothing left is released."""
        instance = self._instances[name]
        ended = instance.advance(now)
        for at, key in ended:
            self._result.ends[key] = at
            self._result.seconds = max(self._result.seconds, at)
        self._tell(name, [key for _, key in ended], now)
        if instance.empty:
            self._close(name, ended[-1][0] if ended else now)

    def _request(self, name: str, now: float) -> None:
        """An instance begins anew with what it holds."""
        if self._handling.flushes is not None:
            keys = self._instances[name].keys()
            schedule = self._handling.flushes(len(keys), now)
            self._untold[name] = _Untold(schedule, Counter(prompt for prompt, _ in keys))

    def _tell(self, name: str, ended: list[Key], now: float) -> None:
        untold = self._untold.get(name)
        if untold is not None:
            for key in ended:
                untold.ended(key)
            told = self._instances[name].empty or untold.schedule.due(now, len(untold.keys)) != "nothing"
            ended = untold.take(now) if told else []
        if ended:
            self._migration.finished(name, ended)

    def _close(self, name: str, now: float) -> None:
        instance = self._instances.pop(name)
        self._untold.pop(name, None)
        self._version.pop(name, None)
        self._nodes.pop(name, None)
        self._result.held.append(Held(name, self._begun.pop(name), now, instance.busy, name in self._spot))

    def _tick(self, now: float) -> None:
        for name in list(self._instances):
            self._follow(name, now)
            if name in self._instances:
                self._migration.progressed(name, self._instances[name].tokens())
        moves = self._migration.decide(now) if now >= self._go_on_at else []
        if moves:
            self._go_on_at = now + self._handling.pause_seconds
            moves = self._cut(moves, now)
        receivers: set[str] = set()
        for move in moves:
            self._move(move, now, first=move.destination not in receivers)
            if move.destination is not None:
                receivers.add(move.destination)
        involved = receivers | {move.source for move in moves}
        for name in list(self._instances):
            if name in involved:
                self._request(name, now)
            self._schedule(name)

    def _cut(self, moves: Sequence[Move], now: float) -> list[Move]:
        """Actors that take part in moves report what they have finished; returns what is left to move."""
        involved = {name: None for move in moves for name in (move.source, move.destination) if name is not None}
        told: set[Key] = set()
        for name in involved:
            if (untold := self._untold.get(name)) is not None:
                told.update(untold.keys)
                self._migration.finished(name, untold.take(now))
        left = [
            Move(move.source, tuple(key for key in move.samples if key not in told), move.destination) for move in moves
        ]
        return [move for move in left if move.samples]

    def _move(self, move: Move, now: float, *, first: bool) -> None:
        destination = move.destination
        assert destination is not None
        source, target = self._instances[move.source], self._instances[destination]
        self._migration.moved(move, destination)
        if first:
            target.pause(self._handling.pause_seconds, recompute=self._handling.restarts_receiver)
        target.add(source.remove(set(move.samples)))
        self._result.moves += len(move.samples)
        if source.empty:
            self._close(move.source, now)

    def _befall(self, now: float, kind: str, name: str) -> None:
        if kind == "instance":
            self._fail(now, name)
        elif kind == "node":
            for instance, node in list(self._nodes.items()):
                if node == name:
                    self._fail(now, instance)
        elif kind == "reclaim" and name in self._instances:
            # It works on while its successor starts, as far as the notice allows.
            until = now + min(self._conditions.notice_seconds, self._start)
            heapq.heappush(self._mishaps, (until, "reclaimed", name))
        elif kind == "reclaimed":
            self._succeed(name, now, ready=now + max(0.0, self._start - self._conditions.notice_seconds), lose=False)

    def _fail(self, now: float, name: str) -> None:
        self._succeed(name, now, ready=now + self._start, lose=True)

    def _succeed(self, name: str, now: float, *, ready: float, lose: bool) -> None:
        """An instance is gone: a new one goes on with what it held."""
        if name not in self._instances:
            return
        self._follow(name, now)
        if name not in self._instances:
            return
        instance = self._instances[name]
        move = self._migration.lost(name)
        assert move is not None
        running = max(1, len(instance.tokens()))
        responses = instance.remove(set(move.samples))
        if lose:
            context = sum(each.prompt_tokens + each.tokens for each in responses) / len(responses)
            # On average half of the time between two flushes is lost.
            gone = self._handling.flush_seconds / 2 / self._profile.latency.decode_seconds(running, context)
            for response in responses:
                response.tokens = max(0.0, response.tokens - gone)
        self._close(name, now)
        self._result.lost += lose
        self._result.reclaimed += not lose
        successor = self._open(responses, ready)
        self._migration.resumed(successor, {each.key: (each.prompt_tokens, int(each.tokens)) for each in responses})
