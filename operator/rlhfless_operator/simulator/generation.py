"""One generation stage in discrete events: shares, cuts, failures, and the time for which instances are held."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.moves.migration import Key, Migration, Move, Rule
from rlhfless_operator.simulator.instance import Instance, LettingGo, Response


class FlushSchedule(Protocol):
    """The moments at which an instance reports ended responses; see `rlhfless_functions.generation.rollout_files`."""

    def group_completed(self) -> None:
        """Record that all of a prompt's responses that the instance holds have ended."""

    def due(self, now: float, pending: int) -> str:
        """Return `nothing`, or another word if the instance reports them now."""

    def flushed(self, now: float) -> None:
        """Record that the instance has reported them."""


@dataclass(frozen=True)
class Handling:
    """The treatment of a stage's instances besides the plan."""

    rule: Rule | None = None
    """Rule that decides on cuts; None for no cuts."""
    max_moves: int = 2
    tick_seconds: float = 0.25
    """Seconds between two times that the rule is asked."""
    restarts_receiver: bool = False
    """Whether a running receiver is cut as well and computes its contexts again."""
    pause_seconds: float = 0.0
    """Further seconds that a cut costs a receiver. Until all go on, no other actor is cut."""
    ready_seconds: float = 0.0
    """Moment at which instances are ready to work; their start before that is charged but delays no sample."""
    failures_per_hour: float = 0.0
    """Instances lost per instance-hour."""
    letting_go: LettingGo | None = None
    """Terms on which an instance is let go while environments work; None if it is kept."""
    flush_seconds: float = 5.0
    """Longest time for which only the instance has its newest tokens."""
    flushes: Callable[[int, float], FlushSchedule] | None = None
    """(responses, now) → the schedule of an instance that begins with this number of responses. With None it reports
    each ended response at once."""


@dataclass(slots=True)
class Held:
    """The time for which an instance was held, and the part of it in which it worked."""

    name: str
    begin: float
    end: float
    busy: float
    let_go: float = 0.0
    """Seconds of this time for which it was let go, because all of its responses were with their environments."""

    @property
    def seconds(self) -> float:
        """Seconds for which it was held."""
        return self.end - self.begin - self.let_go


@dataclass
class GenerationRun:
    """The result of a stage."""

    ends: dict[Key, float] = field(default_factory=dict)
    """Moment at which each response ended."""
    held: list[Held] = field(default_factory=list)
    seconds: float = 0.0
    """Moment at which the last response ended."""
    moves: int = 0
    """Number of responses moved by choice."""
    lost: int = 0
    """Number of instances that were lost."""


def run_generation(
    shares: Sequence[Sequence[Response]],
    profile: InstanceProfile,
    outlook: Callable[[Key, int], tuple[float, float]],
    handling: Handling,
    *,
    max_batch: int,
    random: np.random.Generator | None = None,
) -> GenerationRun:
    """Run the shares, one instance each.

    Args:
        shares: responses in the order of admission; the run changes them.
        outlook: (sample, tokens so far) → response tokens still expected and the chance of a runaway, for the rule.
        random: for failures.
    """
    return _Stage(shares, profile, outlook, handling, max_batch, random).run()


@dataclass
class _Untold:
    """Responses that one request of an instance has finished and not reported yet."""

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
    ) -> None:
        self._profile, self._handling, self._max_batch, self._random = profile, handling, max_batch, random
        self._start = profile.startup_seconds + profile.weight_load_seconds
        self._migration = Migration(handling.rule, outlook, max_moves=handling.max_moves)
        self._instances: dict[str, Instance] = {}
        self._begun: dict[str, float] = {}
        self._events: list[tuple[float, int, str]] = []
        self._failures: list[tuple[float, str]] = []
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
            failure = self._failures[0][0] if self._failures else math.inf
            now = min(end, tick, failure)
            if now == failure:
                self._fail(*heapq.heappop(self._failures))
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
        """Start an instance that is ready at `ready`."""
        name = f"actor-{self._opened}"
        profile, handling = self._profile, self._handling
        instance = Instance(
            *(name, profile.latency, ready),
            max_batch=self._max_batch,
            kv_tokens=profile.kv_tokens,
            letting_go=handling.letting_go,
        )
        instance.add(responses)
        self._instances[name] = instance
        self._request(name, instance.now)
        self._begun[name] = ready - self._start
        if self._handling.failures_per_hour > 0 and self._random is not None:
            failure = ready + self._random.exponential(3600 / self._handling.failures_per_hour)
            heapq.heappush(self._failures, (failure, name))
        self._opened += 1
        self._schedule(name)
        return name

    def _schedule(self, name: str) -> None:
        instance = self._instances.get(name)
        if instance is None:
            return
        self._version[name] = self._version.get(name, 0) + 1
        heapq.heappush(self._events, (instance.next_end(), self._version[name], name))

    def _follow(self, name: str, now: float) -> None:
        """Bring an instance up to now, and release it if it has nothing left."""
        instance = self._instances[name]
        ended = instance.advance(now)
        for at, key in ended:
            self._result.ends[key] = at
            self._result.seconds = max(self._result.seconds, at)
        self._tell(name, [key for _, key in ended], now)
        if instance.empty:
            self._close(name, ended[-1][0] if ended else now)

    def _request(self, name: str, now: float) -> None:
        """Let an instance begin a new request with the responses that it holds."""
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
        self._result.held.append(Held(name, self._begun.pop(name), now, instance.busy, instance.let_go))

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
        """Let the actors of these moves report their finished responses, and return the moves that are left."""
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

    def _fail(self, now: float, name: str) -> None:
        """Lose an instance. A new one goes on with the responses that it held."""
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
        context = sum(each.context for each in responses) / len(responses)
        # On average half of the time between two flushes is lost.
        gone = self._handling.flush_seconds / 2 / self._profile.latency.decode_seconds(running, context)
        for response in responses:
            # What an environment was asked is stored.
            stored = 0 if response.episode is None else response.episode.turn_begin
            response.tokens = max(float(stored), response.tokens - gone)
        self._close(name, now)
        self._result.lost += 1
        successor = self._open(responses, now + self._start)
        self._migration.resumed(successor, {each.key: (each.prompt_tokens, int(each.tokens)) for each in responses})
