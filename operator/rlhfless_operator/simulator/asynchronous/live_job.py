"""Ours with batches that live, in discrete events: groups join one by one, and new weights are swapped in flight.

This is the live loop with `newWeights: switch` (`training/stages/live_actors.py`). The next rollout begins as soon as
one of its groups has room. Groups wait, those of the earliest rollout first, and each joins the batch with the fewest
samples. An actor without samples ends once no groups wait.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.simulator.asynchronous.job import AsynchronousJob, Rollout, StageSeconds
from rlhfless_operator.simulator.asynchronous.live_plans import LivePlans
from rlhfless_operator.simulator.asynchronous.systems import Rollouts
from rlhfless_operator.simulator.asynchronous.work import Group
from rlhfless_operator.simulator.instance import Instance


@dataclass(frozen=True)
class Swaps:
    """The costs of new weights for an actor."""

    load_seconds: float
    """Seconds until a fresh actor has its first weights."""
    pause_seconds: float
    """Seconds for which an actor stands still for newer ones, which its instance has fetched before."""
    recomputes: bool = True
    """Whether keys and values of unfinished responses are computed anew."""


@dataclass(eq=False)
class _Actor:
    instance: Instance
    begin: float
    busy: int = 0
    """Unfinished samples."""
    announced: int = -1
    """Number of its valid event."""


class LiveJob(AsynchronousJob):
    """A job whose actors' batches go on from rollout to rollout.

    Args:
        profile: of an instance.
        sequences: most sequences that an instance decodes at a time.
        swaps: costs of new weights.
    """

    def __init__(
        self,
        system: Rollouts,
        size: int,
        seconds: StageSeconds,
        plans: LivePlans,
        history: History,
        batches: Iterator[list[Group]],
        *,
        profile: InstanceProfile,
        sequences: int,
        swaps: Swaps,
    ) -> None:
        super().__init__(system, size, seconds, plans, history, batches)
        self._batches_of = plans
        self._profile, self._sequences, self._swaps = profile, sequences, swaps
        self._actors: dict[int, _Actor] = {}
        self._opened = 0
        self._count = self._places = 1
        self._waiting: deque[Group] = deque()
        """Groups that no batch has, those of the earliest rollout first."""
        self._samples = 0
        """Number of their samples."""

    def _begin(self, now: float) -> None:
        self._deal(now)
        while self._begun < self._admitted and not self._waiting and self._has_place:
            self._begun += 1
            groups = {group.number: group for group in self._draw()}
            plan = self._batches_of.plan_batches(list(groups.values()))
            largest = max(len(group.lengths) for group in groups.values())
            self._count, self._places = plan.actors, min(self._sequences, max(plan.places, largest))
            self._opens(groups, plan.preparers, now)
            self._waiting.extend(plan.order)
            self._samples += sum(len(group.lengths) for group in plan.order)
            self._deal(now)

    def _opens(self, groups: dict[int, Group], preparers: int, now: float) -> None:
        generators, prepares = self._generators.begin(self._begun, 1), self._preparers.begin(self._begun, preparers)
        # Groups belong to batches, and not to actors of their rollout.
        generators.left = 0
        self._enter(Rollout(self._begun, groups, self._written, now, generators, prepares))

    @property
    def _has_place(self) -> bool:
        return len(self._actors) < self._count or self._least_loaded(1) is not None

    def _least_loaded(self, samples: int) -> _Actor | None:
        able = [each for each in self._actors.values() if each.busy + samples <= self._places or not each.busy]
        return min(able, key=lambda each: each.busy, default=None)

    def _deal(self, now: float) -> None:
        """Give waiting groups to actors with places for them, open missing actors, and end those without work."""
        touched: set[int] = set()
        while self._waiting:
            group = self._waiting[0]
            busy = sum(each.busy for each in self._actors.values())
            wanted = math.ceil((self._samples + busy) / self._places)
            actor = self._least_loaded(len(group.lengths))
            if (actor is None or actor.busy) and len(self._actors) < min(self._count, wanted):
                actor = self._open(now)
            if actor is None:
                break
            self._waiting.popleft()
            self._samples -= len(group.lengths)
            self._follow(actor, now)
            actor.instance.add(group.responses())
            actor.busy += len(group.lengths)
            touched.add(id(actor))
        for name, actor in list(self._actors.items()):
            if id(actor) in touched:
                self._expect(name)
            elif not actor.busy and not self._waiting:
                self._end(name, now)

    def _open(self, now: float) -> _Actor:
        ready = now + self._swaps.load_seconds
        instance = Instance(
            str(self._opened),
            self._profile.latency,
            ready,
            max_batch=self._sequences,
            kv_tokens=self._profile.kv_tokens,
        )
        actor = self._actors[self._opened] = _Actor(instance, now)
        self._opened += 1
        return actor

    def _end(self, name: int, now: float) -> None:
        actor = self._actors.pop(name)
        self._work.generation.append((actor.begin, now))
        begin = min(now, actor.begin + self._swaps.load_seconds)
        self._work.decoding.append((begin, begin + actor.instance.busy))

    def _expect(self, name: int) -> None:
        actor = self._actors[name]
        end = actor.instance.next_end()
        if end < math.inf:
            actor.announced = self._announce(end, "batch", name)

    def _batch_event(self, name: int, number: int, now: float) -> None:
        actor = self._actors.get(name)
        if actor is not None and actor.announced == number:
            self._follow(actor, now)
            self._expect(name)

    def _follow(self, actor: _Actor, now: float) -> None:
        if now <= actor.instance.now:
            return
        for at, (group, _) in actor.instance.advance(now):
            actor.busy -= 1
            rollout = self._rollout_of(group)
            rollout.unfinished[group] -= 1
            if not rollout.unfinished[group]:
                self._announce(at, "complete", rollout.number, (group,))

    def _version_is_there(self, now: float) -> None:
        """Let all actors go on with the newest weights."""
        for name, actor in self._actors.items():
            self._follow(actor, now)
            actor.instance.pause(self._swaps.pause_seconds, recompute=self._swaps.recomputes)
            self._expect(name)

    def _closes(self, now: float) -> None:
        for name in list(self._actors):
            self._follow(self._actors[name], now)
            self._end(name, now)
