"""Ours with batches that live, in discrete events: groups join one by one, and batches take new weights.

This is the live loop (`training/stages/live_actors.py`), and decides by the same code. The next rollout begins as soon
as one of its groups has room. Groups wait, those of the earliest rollout first, and `planner/moves/live_batches.py`
says which batch each joins. With `newWeights: switch` all responses go on with new weights as soon as they are there.
With `finish` a batch has responses of one version; the last ones of a version are gathered, and an empty batch takes
the newest weights. An actor without samples ends once no groups wait.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.moves.live_batches import Batch, Empty, Give, WaitingGroup, deal
from rlhfless_operator.planner.moves.live_sizes import Batches
from rlhfless_operator.simulator.asynchronous.job import AsynchronousJob, Rollout, StageSeconds
from rlhfless_operator.simulator.asynchronous.live_plans import LivePlans
from rlhfless_operator.simulator.asynchronous.systems import Rollouts
from rlhfless_operator.simulator.asynchronous.work import Group
from rlhfless_operator.simulator.instance import Instance, Response


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
    version: int
    """Version of its batch; 0 with `switch`, where all batches have the same."""
    busy: int = 0
    """Unfinished samples."""
    announced: int = -1
    """Number of its valid event."""


class LiveJob(AsynchronousJob):
    """A job whose actors' batches go on from rollout to rollout.

    Args:
        profile: of an instance.
        swaps: costs of new weights.
        least: see `AsynchronousJob`.
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
        swaps: Swaps,
        least: int = 0,
    ) -> None:
        super().__init__(system, size, seconds, plans, history, batches, least=least)
        self._switches = system.new_weights == "switch"
        self._plans = plans
        self._profile, self._swaps = profile, swaps
        self._actors: dict[int, _Actor] = {}
        self._opened = 0
        self._asked, self._group = Batches(1, 1, 1), 1
        self._waiting: dict[int, deque[list[Response]]] = {}
        """By rollout, the responses of groups that no batch has, or of a part of a group."""

    # --- rollouts ---

    def _begin(self, now: float) -> None:
        self._deal(now)
        while self._begun < self._admitted and not self._waiting and self._has_place():
            self._begun += 1
            groups = {group.number: group for group in self._draw()}
            plan = self._plans.plan(list(groups.values()))
            self._group = max(len(group.lengths) for group in groups.values())
            self._asked = Batches(plan.actors, plan.places, plan.samples, plan.sequences)
            self._opens(groups, plan.preparers, now)
            self._waiting[self._begun] = deque(group.responses() for group in plan.order)
            self._deal(now)

    def _opens(self, groups: dict[int, Group], preparers: int, now: float) -> None:
        part = self._preparers.begin(self._begun, preparers)
        self._enter(Rollout(self._begun, groups, self._written, now, 0, part))

    def _version_of(self, rollout: int) -> int:
        return 0 if self._switches else self._rollouts[rollout].version

    def _has_place(self) -> bool:
        """Return whether a group of the next rollout would begin at once."""
        if len(self._actors) < self._asked.actors:
            return True
        group = WaitingGroup(0 if self._switches else self._written, 1)
        found = deal(self._seen(list(self._actors.values())), [group], may_open=False, gathers=False)
        return any(isinstance(command, Give) for command in found)

    # --- assignment ---

    def _seen(self, actors: list[_Actor]) -> list[Batch]:
        """Return the batches as far as they matter to who deals."""
        may_open = len(self._actors) < self._asked.actors
        room = self._asked.room(self._unfinished(), len(self._actors), self._group, may_open=may_open)
        return [Batch(actor.version, actor.busy, self._asked.free(actor.busy, room)) for actor in actors]

    def _samples_waiting(self) -> int:
        return sum(len(group) for groups in self._waiting.values() for group in groups)

    def _unfinished(self) -> Counter[int]:
        """Return the number of unfinished samples of each version."""
        samples: Counter[int] = Counter()
        for rollout, groups in self._waiting.items():
            samples[self._version_of(rollout)] += sum(map(len, groups))
        for actor in self._actors.values():
            samples[actor.version] += actor.busy
        return samples

    def _deal(self, now: float) -> None:
        """Give waiting groups to actors with places for them, open missing actors, and end those without work."""
        touched: set[int] = set()
        left = 0
        while self._waiting:
            for _ in range(self._asked.missing(self._unfinished(), len(self._actors), left=left)):
                if self._waiting:
                    self._open(now, touched)
            emptied = self._give(now, touched)
            left = self._samples_waiting()
            if not emptied and (not left or len(self._actors) >= self._asked.actors):
                break
        for name, actor in list(self._actors.items()):
            if name in touched:
                self._expect(name)
            elif not actor.busy and not self._waiting:
                self._end(name, now)

    def _give(self, now: float, touched: set[int]) -> bool:
        """Deal once. Return whether a batch was emptied, so that there is more to deal."""
        # Actors that are too many take no more.
        able = sorted(self._actors, key=lambda name: -self._actors[name].busy)[: self._asked.actors]
        batches = self._seen([self._actors[name] for name in able])
        groups = self._next_groups(sum(batch.room for batch in batches))
        commands = deal(
            batches,
            [WaitingGroup(self._version_of(rollout), len(group)) for rollout, group in groups],
            may_open=len(self._actors) < self._asked.actors,
            gathers=False,
        )
        emptied = False
        for command in commands:
            name = able[command.batch]
            if isinstance(command, Empty):
                self._empty(name, now)
                emptied = True
            else:
                self._join(name, *groups[command.group], now)
            touched.add(name)
        return emptied

    def _next_groups(self, room: int) -> list[tuple[int, list[Response]]]:
        """Return the groups that begin next: of each version as many as could join, and one that could not."""
        found: list[tuple[int, list[Response]]] = []
        left: dict[int, int] = {}
        for rollout in sorted(self._waiting):
            version = self._version_of(rollout)
            for group in self._waiting[rollout]:
                if left.setdefault(version, room) < 0:
                    break
                left[version] -= len(group)
                found.append((rollout, group))
        return found

    def _join(self, name: int, rollout: int, group: list[Response], now: float) -> None:
        actor, groups = self._actors[name], self._waiting[rollout]
        # Groups are told apart by identity: parts of one may wait apart.
        groups.remove(next(each for each in groups if each is group))
        if not groups:
            del self._waiting[rollout]
        self._follow(actor, now)
        if actor.version != self._version_of(rollout):
            actor.version = self._version_of(rollout)
            actor.instance.pause(self._swaps.pause_seconds)
        actor.instance.add(group)
        actor.busy += len(group)

    def _empty(self, name: int, now: float) -> None:
        """Let all samples of a batch wait again, before all others of their rollouts, each of them alone."""
        actor = self._actors[name]
        self._follow(actor, now)
        for response in actor.instance.remove(set(actor.instance.keys())):
            self._waiting.setdefault(self._number_of[response.prompt], deque()).appendleft([response])
        actor.busy = 0

    def _open(self, now: float, touched: set[int]) -> None:
        """Open an actor, with the group that begins next."""
        name, ready = self._opened, now + self._swaps.load_seconds
        instance = Instance(
            str(name),
            self._profile.latency,
            ready,
            max_batch=self._asked.sequences(self._group),
            kv_tokens=self._profile.kv_tokens,
        )
        rollout = min(self._waiting)
        self._actors[name] = _Actor(instance, now, self._version_of(rollout))
        self._opened += 1
        self._join(name, rollout, self._waiting[rollout][0], now)
        touched.add(name)

    def _end(self, name: int, now: float) -> None:
        actor = self._actors.pop(name)
        self._work.generation.append((actor.begin, now))
        begin = min(now, actor.begin + self._swaps.load_seconds)
        self._work.decoding.append((begin, begin + actor.instance.busy))

    # --- batches ---

    def _expect(self, name: int) -> None:
        actor = self._actors[name]
        end = actor.instance.next_end()
        if end < math.inf:
            actor.announced = self._announce(end, "batch", name)

    def _generates(self, name: int, order: int, now: float) -> None:
        actor = self._actors.get(name)
        if actor is not None and actor.announced == order:
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
        """Let all actors go on with the newest weights, if responses switch."""
        if not self._switches:
            return
        for name, actor in self._actors.items():
            self._follow(actor, now)
            actor.instance.pause(self._swaps.pause_seconds, recompute=self._swaps.recomputes)
            self._expect(name)

    def _closes(self, now: float) -> None:
        for name in list(self._actors):
            self._follow(self._actors[name], now)
            self._end(name, now)

    def _is_over(self, rollout: Rollout) -> None:
        """Do nothing: actors go on with other rollouts."""
