"""Ours in discrete events: rollouts that overlap, and steps that take the first complete groups.

The live loop's own code chooses the groups of a step, lets rollouts begin, cuts groups into chunks for preparation, and
keeps the history. `live_job.py` has the generation of the live loop, `shares_job.py` one for forecasts.
"""

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless_operator.planner.groups.group_buffer import GroupBuffer, GroupName, ReadyGroup
from rlhfless_operator.planner.groups.staleness import steps_ahead
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.stage_instances import RolloutPart, StageInstances
from rlhfless_operator.planner.step.async_planning import PUBLISHING
from rlhfless_operator.planner.step.chunks import chunk_size
from rlhfless_operator.simulator.asynchronous.systems import Rollouts
from rlhfless_operator.simulator.asynchronous.work import Group, Step


class Observer(Protocol):
    """Learns from rollouts."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Record that a rollout's groups are complete."""
        ...


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of the stages of an asynchronous job."""

    weight_load: float
    """Seconds until an instance has other weights."""
    preparation_token: float
    """Seconds of a preparation instance for a token."""
    learning_token: float
    """Seconds of the learner for a token."""
    update: float
    """Seconds of the learner once a step, with the copy of the weights to publish."""
    publishing: float = 0.0
    """Seconds until a copy is published. The learner goes on meanwhile if the next step's groups are there."""
    prepares: bool = True
    """Whether preparation has instances of its own. If not, a complete group can be learnt from."""


Use = tuple[float, float]
"""(begin, end) of an instance's work, in seconds."""


@dataclass
class Work:
    """The work of a simulated job, with its moments."""

    steps: list[Step] = field(default_factory=list)
    generation: list[Use] = field(default_factory=list)
    """Uses by actors, with loading."""
    decoding: list[Use] = field(default_factory=list)
    """The same without loading."""
    rollouts: list[Use] = field(default_factory=list)
    """(begin, end) of each rollout; it ends when all of its groups are prepared."""
    preparation: list[Use] = field(default_factory=list)
    learning: list[Use] = field(default_factory=list)
    steps_learnt: list[Use] = field(default_factory=list)
    """(begin, end) of each step's learning. The learner may wait for groups meanwhile, and can't be let go."""
    left: list[tuple[Group, int]] = field(default_factory=list)
    """Groups that were begun and that no finished step has learnt from, with the version that began them."""
    dropped: int = 0
    """Number of times that a group was dropped, to be generated anew."""


@dataclass
class Rollout:
    """A rollout that is under way."""

    number: int
    groups: dict[int, Group]
    version: int
    begin: float
    generating: int
    """Number of its actors that have anything left, if it has actors of its own."""
    preparers: RolloutPart
    """Part of the preparation instances. Its actors are the most chunks that are prepared at a time."""
    unfinished: dict[int, int] = field(init=False)
    """Number of each group's responses that have not ended or not begun."""
    ends: dict[int, float] = field(default_factory=dict)
    """Moment at which the last of each group's begun responses ends."""
    complete: deque[int] = field(default_factory=deque)
    """Groups that wait for preparation, in the order of completion."""
    preparing: int = 0
    """Number of chunks that are prepared, or wait for an instance."""
    unprepared: int = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = {number: len(group.lengths) for number, group in self.groups.items()}
        self.unprepared = len(self.groups)


class AsynchronousJob(ABC):
    """A job whose groups go to the learner on their own.

    Args:
        system: its staleness, and its rule for groups that are too stale.
        size: number of groups that a step learns from.
        seconds: of the stages.
        observer: learns from complete rollouts.
        history: times of rollouts and learning.
        batches: the groups of each rollout.
        total: number of steps of the job. No more groups begin than they learn from.
        least: fewest groups that a step takes at a time; 0 if it takes all of them at once.
    """

    def __init__(
        self,
        system: Rollouts,
        size: int,
        seconds: StageSeconds,
        observer: Observer,
        history: History,
        batches: Iterator[list[Group]],
        *,
        total: float = math.inf,
        least: int = 0,
    ) -> None:
        self._total = total * size
        self._most_stale, self._seconds, self._observer, self._history = (
            system.max_staleness,
            seconds,
            observer,
            history,
        )
        self._drawn = itertools.chain.from_iterable(batches)
        self._buffer = GroupBuffer(size, system.max_staleness, system.too_stale, least=least)
        self._events: list[tuple[float, int, str, int, tuple[int, ...]]] = []
        self._numbers = itertools.count()
        self._rollouts: dict[int, Rollout] = {}
        """Incomplete rollouts by number."""
        self._names: dict[GroupName, tuple[Group, int]] = {}
        """Groups that no step has taken, with the version that began them."""
        self._dropped: list[GroupName] = []
        """Groups to be generated anew."""
        self._begun = 0
        self._admitted = 0
        """The last rollout that may begin."""
        self._preparers: StageInstances[tuple[int, ...]] = StageInstances()
        """The preparation instances; the groups of chunks wait for one."""
        self._number_of: dict[int, int] = {}
        """Rollout that each group belongs to."""
        self._learning = False
        self._taken = 0
        """Number of steps that have all of their groups."""
        self._held: list[tuple[Group, int]] = []
        """Groups of the step after those."""
        self._uses: list[Use] = []
        """The learner's work for that step so far, or for a step that is learnt and not published."""
        self._publishes_next = False
        """Whether a step is learnt that will be published after the one before."""
        self._written = 0
        """The newest version that is written down."""
        self._publishing = False
        self._work = Work()
        self._batches: dict[int, list[tuple[Group, int]]] = {}
        """Groups that each step learns from, until the step is written down."""

    def until(self, steps: int) -> Work:
        """Run until `steps` steps are written down."""
        now, kind = 0.0, ""
        self._admit()
        while self._written < steps:
            self._begin(now)
            if kind != "batch":
                # What a batch has completed comes as an event of its own.
                self._prepare(now)
                self._learn(now)
                # A step that waits may have let more rollouts begin.
                self._begin(now)
            now, order, kind, number, groups = heapq.heappop(self._events)
            if kind in ("batch", "actor"):
                self._generates(number, order, now)
            elif kind == "complete":
                self._rollouts[number].complete.extend(groups)
            elif kind == "prepared":
                self._rollouts[number].preparers.at_work -= 1
                # A chunk that waits goes before the next chunk of this instance's rollout.
                self._deal_chunks(now)
                self._rollouts[number].preparing -= 1
                self._prepared(self._rollouts[number], groups, now)
            elif kind == "piece":
                self._learning = False
            elif kind == "learnt":
                self._learnt(now)
            elif kind == "published":
                self._published(number, now)
        self._closes(now)
        if self._uses:
            self._work.learning += self._uses
            self._work.steps_learnt.append((self._uses[0][0], now))
        begun = itertools.chain.from_iterable(self._batches.values())
        self._work.left = [*begun, *self._held, *self._names.values()]
        return self._work

    # --- generation ---

    def _admit(self) -> None:
        """Let as many rollouts begin as staleness allows."""
        ahead = steps_ahead(self._most_stale, self._history.mean("rollout"), self._history.mean("learning"))
        while self._buffer.admits_rollout(self._admitted - self._begun, self._total, self._written, ahead):
            self._admitted += 1

    @abstractmethod
    def _begin(self, now: float) -> None:
        """Begin rollouts that may begin and have room, and give samples to instances."""

    def _enter(self, rollout: Rollout) -> None:
        number, version = rollout.number, rollout.version
        self._rollouts[number] = rollout
        self._buffer.begin(number, rollout.groups, version)
        self._names |= {GroupName(number, each): (group, version) for each, group in rollout.groups.items()}
        self._number_of |= dict.fromkeys(rollout.groups, number)

    def _rollout_of(self, group: int) -> Rollout:
        return self._rollouts[self._number_of[group]]

    @abstractmethod
    def _generates(self, name: int, order: int, now: float) -> None:
        """Take in that an actor may have ended samples.

        Args:
            name: that the event was announced with.
            order: number of the event.
        """

    @abstractmethod
    def _version_is_there(self, now: float) -> None:
        """Take a new version up."""

    @abstractmethod
    def _closes(self, now: float) -> None:
        """Count the work of actors that go on after the last step."""

    def _draw(self) -> list[Group]:
        """Draw the groups of a rollout: dropped groups, with the lengths that they had, and new ones."""
        again, others = self._buffer.next_rollout(self._dropped, self._total)
        self._dropped = [name for name in self._dropped if name not in again]
        groups = [self._names.pop(name)[0] for name in again]
        return groups + list(itertools.islice(self._drawn, others))

    # --- preparation ---

    def _prepare(self, now: float) -> None:
        """Prepare complete groups in chunks, as many at a time as each rollout's plan says."""
        for rollout in [*self._rollouts.values()]:
            if not self._seconds.prepares:
                groups, rollout.complete = tuple(rollout.complete), deque()
                self._prepared(rollout, groups, now)
                continue
            most, ended = rollout.preparers.actors, not rollout.generating
            while rollout.preparing < most and rollout.complete:
                size = chunk_size(len(rollout.complete), rollout.unprepared, most, ended=ended)
                if not size:
                    break
                chunk = tuple(rollout.complete.popleft() for _ in range(size))
                rollout.preparing += 1
                self._preparers.wait(rollout.preparers, chunk)
        self._deal_chunks(now)

    def _deal_chunks(self, now: float) -> None:
        while (dealt := self._preparers.deal()) is not None:
            part, chunk = dealt
            tokens = sum(self._rollouts[part.step].groups[group].tokens for group in chunk)
            end = now + tokens * self._seconds.preparation_token
            self._work.preparation.append((now, end))
            self._announce(end, "prepared", part.step, chunk)

    def _prepared(self, rollout: Rollout, groups: tuple[int, ...], now: float) -> None:
        for group in groups:
            self._buffer.complete(ReadyGroup(GroupName(rollout.number, group), rollout.version, ""))
        rollout.unprepared -= len(groups)
        if groups and not rollout.unprepared:
            self._history.add("rollout", now - rollout.begin)
            self._work.rollouts.append((rollout.begin, now))
            self._observer.observe(list(rollout.groups.values()))
            self._forget(rollout)

    def _forget(self, rollout: Rollout) -> None:
        if not rollout.generating and not rollout.unprepared:
            del self._rollouts[rollout.number]
            self._is_over(rollout)
            self._preparers.end(rollout.preparers)

    @abstractmethod
    def _is_over(self, rollout: Rollout) -> None:
        """Take in that a rollout is generated and prepared."""

    # --- learning ---

    def _learn(self, now: float) -> None:
        """Let the learner take the first groups that a step may take, if there are enough of them."""
        if self._learning:
            return
        step = self._taken + 1
        dropped = self._buffer.drop(step)
        self._dropped += dropped
        self._work.dropped += len(dropped)
        held = len(self._held)
        chosen = self._buffer.choose(step, held) if self._buffer.has_enough(held) else []
        if not chosen:
            self._admit()
            return
        names = [each.group.name for each in chosen]
        self._buffer.taken(names)
        groups = [self._names.pop(name) for name in names]
        seconds = sum(group.tokens for group, _ in groups) * self._seconds.learning_token
        self._held += groups
        is_full = len(self._held) == self._buffer.size
        if is_full:
            self._taken, self._batches[step], self._held = step, self._held, []
            seconds += self._seconds.update
        self._learning = True
        self._uses.append((now, now + seconds))
        self._announce(now + seconds, "learnt" if is_full else "piece", step)

    def _learnt(self, now: float) -> None:
        """End a step's learning. Its version is published once the one before is; the learner goes on meanwhile."""
        self._publishes_next = self._publishing
        if self._publishing:
            # The learner goes on when the version before is published.
            return
        step = self._written + 1
        seconds = math.fsum(end - begin for begin, end in self._uses)
        self._history.add("learning/train", seconds - self._seconds.update)
        self._history.add("learning", seconds)
        if self._seconds.publishing:
            self._history.add(PUBLISHING, self._seconds.publishing)
        self._work.learning += self._uses
        self._work.steps_learnt.append((self._uses[0][0], self._uses[-1][1]))
        self._uses = []
        self._learning = False
        if not self._seconds.publishing:
            self._published(step, now)
        else:
            self._publishing = True
            self._announce(now + self._seconds.publishing, "published", step)

    def _published(self, step: int, now: float) -> None:
        """Record that a version is there, and write its step down."""
        self._publishing = False
        self._written = step
        groups, versions = zip(*self._batches.pop(step), strict=True)
        self._work.steps.append(Step(now, groups, versions))
        self._version_is_there(now)
        self._admit()
        if self._publishes_next:
            self._learnt(now)

    def _announce(self, at: float, kind: str, number: int, groups: tuple[int, ...] = ()) -> int:
        order = next(self._numbers)
        heapq.heappush(self._events, (at, order, kind, number, groups))
        return order
