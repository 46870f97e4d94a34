"""The turns of jobs on whole GPUs: pods don't sleep, and a slot that changes hands costs a drain and a start."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhfless_operator.planner.pools.sharing import Pool

TURN_SWITCHES = 50
"""Length of a turn while another job waits, as a multiple of a switch: a fiftieth of the time goes to switching."""


@dataclass(frozen=True)
class SwitchCost:
    """The cost of a slot that changes hands: to let an instance of a stage go, and to have one again."""

    seconds: float = 0.0
    """Seconds until it is gone, and until the next one can work, including repeated work such as the steps since a
    checkpoint."""
    gap_seconds: float | None = None
    """Typical seconds between two uses of an instance; None if unknown."""
    over: bool = False
    """Whether the stage has no more work to come, because the job's steps are done."""

    @property
    def keeps(self) -> bool | None:
        """Whether a job keeps the instance between its uses though another job waits: its GPU can't go there and back
        within the gap. None if unknown."""
        if self.seconds == 0:
            return False
        return None if self.gap_seconds is None else self.gap_seconds < 2 * self.seconds


@dataclass(frozen=True)
class Contender:
    """A job that requests slots of the pool."""

    job: str
    """Unique id of the job."""
    namespace: str
    """Namespace whose quota the job counts against."""
    gpus: int
    """Slots with which it works as fast as alone: those of the instances that work and of those that it keeps for
    later. 0 for a job whose steps are done: it is about to leave, and delays no other job."""
    since: float
    """Moment at which its turn began, or at which it began to wait for one, in seconds."""
    has_turn: bool = False
    priority: int = 0
    """The higher comes first."""
    switch_seconds: float = 0.0
    """Seconds from its last task until another job works in its place, or the reverse: the longer of the two."""
    keeps: bool | None = False
    """Whether it keeps any instance between uses; None if unknown."""


def keeps_any(costs: Iterable[SwitchCost]) -> bool | None:
    """Return whether a job keeps an instance of any stage between uses; None if unknown."""
    found = {cost.keeps for cost in costs}
    return True if True in found else None if None in found else False


def turn_seconds(contenders: Sequence[Contender]) -> float:
    """Return the seconds that a job has its turn before a job of the same priority can take it."""
    return TURN_SWITCHES * max((each.switch_seconds for each in contenders), default=0.0)


def next_turns(contenders: Sequence[Contender], pool: Pool, now: float) -> frozenset[str]:
    """Return the jobs whose turn it is now. The others get no more slots, and finish the tasks that they have.

    If no job keeps an instance between uses, all have their turn: GPUs change hands stage by stage, for no more than a
    job alone would pay. Otherwise a job has its turn with all GPUs that it works with, or not at all: with a part of
    them it would start and drain instances in each step. While nothing is known of any job, all are assumed to keep
    some.

    A job's turn ends when it asks for no GPU, when a job of a higher priority waits for its GPUs, or when one of its
    own priority waits after `turn_seconds`. Waiting jobs come by priority, then in the order in which they came. No job
    overtakes one that waits, unless that one waits only for its namespace's quota.

    Args:
        now: seconds, of the same clock as `Contender.since`.
    """
    known = [each.keeps for each in contenders if each.keeps is not None]
    if known and not any(known):
        return frozenset(each.job for each in contenders)
    turn = turn_seconds(contenders)
    chosen: list[Contender] = []
    waiting: list[Contender] = []
    for each in sorted(contenders, key=lambda each: (-each.priority, each.since, each.job)):
        # A job whose turn it is waits again if it now needs more than older turns leave.
        (chosen if each.has_turn and _fit([*chosen, each], pool) else waiting).append(each)
    for each in waiting:
        over = [one for one in chosen if one.has_turn and _gives_way(one, each, turn, now)]
        removed: list[Contender] = []
        for one in sorted(over, key=lambda one: (one.priority, one.since, one.job)):
            if _fit([*chosen, each], pool):
                break
            chosen.remove(one)
            removed.append(one)
        if _fit([*chosen, each], pool):
            chosen.append(each)
        elif not _waits_for_quota([*chosen, *removed], each, pool):
            chosen += removed
            break
        # The last removed job made room; some of the others may not have been in the way.
        for one in reversed(removed):
            if _fit([*chosen, one], pool):
                chosen.append(one)
    return frozenset(each.job for each in chosen)


def _gives_way(one: Contender, other: Contender, turn: float, now: float) -> bool:
    return one.priority < other.priority or (one.priority == other.priority and one.since + turn <= now)


def _waits_for_quota(chosen: Sequence[Contender], waiting: Contender, pool: Pool) -> bool:
    return sum(each.gpus for each in chosen) + waiting.gpus <= pool.gpus


def _fit(contenders: Sequence[Contender], pool: Pool) -> bool:
    """Return whether the pool and its quotas have room for all of them at once."""
    in_namespace: dict[str, int] = defaultdict(int)
    for each in contenders:
        in_namespace[each.namespace] += each.gpus
    within = all(in_namespace[name] <= quota for name, quota in pool.namespaces.items())
    return within and sum(in_namespace.values()) <= pool.gpus
