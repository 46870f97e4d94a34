"""The turns of tasks on slots whose pods sleep: a pure function of the waiting tasks and the use of the slots.

One instance at a time is awake on a slot. An instance has the same slots all its life.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

MOST_PASSED = 32
"""Number of later tasks of the same priority that may pass a waiting task; then it is the first."""


@dataclass(frozen=True)
class WaitingTask:
    """A task whose turn has not come."""

    number: int
    """Its number: lower for tasks that came earlier."""
    job: str
    """Unique id of its job."""
    instances: Sequence[str]
    """Instances without a task that could take it, awake or asleep, in order of preference."""
    priority: int = 0
    """The higher comes first."""
    place: int = 0
    """Place of its stage in the step: higher for stages nearer to the step's end."""
    passed: int = 0
    """Number of later tasks of its priority that went before it."""
    spare: bool = False
    """Whether it takes only slots that no other task wants, and keeps none of them until it has all of its own."""
    last: str = ""
    """The instance that did its part before, if that is awake. It may have kept some state, so it comes first."""


@dataclass(frozen=True)
class SlotUse:
    """The slots of instances, and the instances that use them now."""

    homes: Mapping[str, Sequence[str]]
    """The slots of each instance."""
    holders: Mapping[str, str | None]
    """The instance that is awake on each slot."""
    jobs: Mapping[str, str] = field(default_factory=dict)
    """The job of each instance."""
    idle: Collection[str] = ()
    """Instances that are awake without a task: they may be put to sleep."""
    leaving: Collection[str] = ()
    """Instances that are giving their slots back."""
    closed: Collection[str] = ()
    """Slots on which an unknown instance may be awake."""
    used: Mapping[str, float] = field(default_factory=dict)
    """GPU-seconds that each job has had lately."""
    unstarted: Collection[str] = ()
    """Instances that would have to be started. They take only tasks that no other instance can take now."""


@dataclass
class Turns:
    """The turns that begin now, and the instances that have to make way."""

    granted: dict[int, str] = field(default_factory=dict)
    """The instance that takes each task, by the task's number. It has its slots already, or they are free."""
    sleeps: list[str] = field(default_factory=list)
    """Idle instances to put to sleep, because a task whose turn it is needs their slots."""
    lacking: list[int] = field(default_factory=list)
    """Tasks that wait though no task wants some slots, because their jobs have no instance on these slots."""


def take_turns(tasks: Sequence[WaitingTask], use: SlotUse) -> Turns:
    """Decide which tasks come next on slots that are free, or whose instance has no task. No instance at work is
    disturbed.

    Tasks get an instance in this order: the highest priority first, then the nearest to the end of its step, then the
    job with the fewest GPU-seconds lately, then the earliest. So one job's stages follow each other while another's
    wait. If each job had the same number of slots, all would end their stages at the same time, and leave slots free at
    the same time. A task that `MOST_PASSED` tasks have passed comes before the others of its priority. A task that
    can't have all of its slots yet keeps those that it can have: else tasks that need fewer would take them for ever.
    Other tasks go past it. Tasks that are content with spare slots come last: a learner that learns from the groups of
    an unfinished batch must not stand in the way of those who finish it.
    """
    return _Round(tasks, use).turns()


class _Round:
    def __init__(self, tasks: Sequence[WaitingTask], use: SlotUse) -> None:
        self._use = use
        self._waiting = tasks
        yielding = {*use.idle, *use.leaving}
        free = {slot for slot, holder in use.holders.items() if holder is None or holder in yielding}
        self._open = free - set(use.closed)
        self._taken: set[str] = set()
        """Instances that have been given a task."""
        self._turns = Turns()

    def turns(self) -> Turns:
        blocked = []
        for task in sorted(self._waiting, key=self._key):
            instances = [name for name in task.instances if name not in self._taken]
            able = [name for name in instances if self._open.issuperset(self._use.homes[name])]
            if able:
                self._give(task, min(able, key=lambda name: (self._rank(task, name), instances.index(name))))
                continue
            blocked.append(task)
            if instances and not task.spare:
                # It keeps the open slots of the instance that lacks the fewest.
                nearest = min(instances, key=lambda name: len(set(self._use.homes[name]) - self._open))
                self._open -= set(self._use.homes[nearest])
        self._turns.lacking = [task.number for task, _ in zip(blocked, self._open, strict=False)]
        return self._turns

    def _key(self, task: WaitingTask) -> tuple[bool, int, bool, int, float, int]:
        if task.passed >= MOST_PASSED:
            return task.spare, -task.priority, False, 0, 0.0, task.number
        used = self._use.used.get(task.job, 0.0)
        return task.spare, -task.priority, True, -task.place, used, task.number

    def _rank(self, task: WaitingTask, name: str) -> tuple[bool, bool, bool, int, int, int, int]:
        """Return the rank of an instance for a task; the lowest is taken.

        The task's last instance comes first, then instances that run already, then those that are awake, then those
        that displace the fewest. Of the others, instances come first whose slots have the fewest instances of the job's
        other stages of their size or smaller: these may have a task before this one ends, because preparation works
        while others generate. Then come instances on slots that the fewest larger instances of other jobs could have
        now, and then those on slots of the fewest larger ones of its own job: a learner may begin when these are free.
        """
        home = set(self._use.homes[name])
        if not home:
            return name != task.last, name in self._use.unstarted, name not in self._use.idle, 0, 0, 0, 0
        holders = {self._use.holders[slot] for slot in home} - {None, name}
        neighbours = [other for other, each in self._use.homes.items() if not home.isdisjoint(each)]
        mine = {other for other in neighbours if self._use.jobs.get(other) == task.job} - set(task.instances)
        small = sum(len(self._use.homes[other]) <= len(home) for other in mine)
        large = sum(
            len(self._use.homes[other]) > len(home) and self._open.issuperset(self._use.homes[other])
            for other in neighbours
            if self._use.jobs.get(other) != task.job
        )
        idle, own = name in self._use.idle, len(mine) - small
        return name != task.last, name in self._use.unstarted, not idle, len(holders), small, large, own

    def _give(self, task: WaitingTask, name: str) -> None:
        home = self._use.homes[name]
        others = {holder for slot in home if (holder := self._use.holders[slot]) is not None and holder != name}
        if not others:
            self._turns.granted[task.number] = name
        self._turns.sleeps += sorted(others - set(self._use.leaving) - set(self._turns.sleeps))
        self._taken.add(name)
        # An instance that is put to sleep takes no task in this round.
        self._taken |= others
        self._open -= set(home)
