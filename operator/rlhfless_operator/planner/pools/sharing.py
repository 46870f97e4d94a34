"""How jobs that have their turn (`whole_gpus.py`) share a pool of GPUs: which of their instances may run now."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhfless_operator.planner.pools.turns import MOST_PASSED

_Turn = tuple[int, bool, int, int, bool, float, str, int, str]
"""The lower comes first; see `share`."""


@dataclass(frozen=True)
class Pool:
    """GPUs that jobs share."""

    gpus: int
    """GPUs of the pool."""
    namespaces: Mapping[str, int] = field(default_factory=dict)
    """Most GPUs of the pool that the jobs of a namespace hold at a time; all of them where it is not named."""


@dataclass(frozen=True)
class Claim:
    """What one stage of one job asks of the pool."""

    job: str
    """Unique id of the job."""
    stage: str
    """The stage; a job has at most one claim for each."""
    namespace: str
    """Namespace whose quota the job counts against."""
    gpus: int
    """GPUs of one instance."""
    working: int
    """Instances with a task. They are never taken away."""
    wanted: int
    """Instances that have a task, or one that waits for them."""
    kept: int = 0
    """Instances beyond these that are good to have: warmed for work to come, or kept with what they have loaded."""
    priority: int = 0
    """The higher comes first."""
    used: float = 0.0
    """GPU-seconds that the job has had lately; among equals the one that had least comes first."""
    place: int = 0
    """Of its stage in the step: of one job's stages the one that is nearest to the step's end comes first."""
    together: bool = False
    """Whether its instances only work together, as a gang of learners does: those that wait for a task get their
    GPUs at once or not at all, and so do those that are kept."""
    since: int = 0
    """How many tasks the pool had begun when it began to wait, or when a task of its own last began."""
    begun: Sequence[int] = ()
    """How many tasks the pool had begun before each of those that work; those that it leaves out came first of all."""


@dataclass
class _Reserve:
    """What others may have of a pool, or of a namespace's quota, while a claim waits that is too large for the rest."""

    priority: int
    """Of the claim that waits; a higher one passes it."""
    room: int
    """GPUs that are left beside it."""
    earlier: int
    """GPUs of the tasks that began before it waited."""
    passing: int
    """GPUs of the tasks that have begun since."""

    def lets_pass(self, claim: Claim, gpus: int) -> bool:
        """Whether it could not begin anyway, and will not begin later for this."""
        return claim.priority > self.priority or (self.earlier > self.room and self.passing + gpus <= self.room)


def share(claims: Sequence[Claim], pool: Pool, begun: int = 0) -> dict[tuple[str, str], int]:
    """How many instances each claim may have now.

    Working instances stay. Then GPUs go one instance at a time, or one gang, to the job of the highest priority, among
    equals to the one that holds the fewest GPUs: max-min fairness. Then come tasks that wait before instances that are
    kept (so a kept instance gives way to work of its own job, and to work of jobs that hold no more than its own, but a
    job within its fair part keeps its learner in memory), then jobs that have used the fewest GPU-seconds. Within a job
    the stage that is nearest to the end of its step comes first. A claim that `MOST_PASSED` tasks have passed comes
    before all others of its priority, the one that has waited longest first. So none waits for ever.

    The first claim that is larger than what is left gets what becomes free. Until the tasks that began before it have
    left enough, smaller ones pass it. Together they never have more than it leaves of the pool: while it is the first,
    it waits no longer than for the tasks that it found. A claim that its namespace's quota has no room for holds up
    that namespace alone. What needs no GPU is not held up at all.

    Args:
        begun: tasks that the pool has begun so far.

    Raises:
        ValueError: an instance, or a gang, is larger than the pool or its namespace's quota, and could never run.
    """
    for claim in claims:
        check_feasible(claim, pool)
    sharers = [claim for claim in claims if claim.gpus]
    granted = {key_of(claim): claim.working for claim in sharers}
    held: dict[str, int] = defaultdict(int)
    in_namespace: dict[str, int] = defaultdict(int)
    for claim in sharers:
        held[claim.job] += claim.working * claim.gpus
        in_namespace[claim.namespace] += claim.working * claim.gpus
    free = pool.gpus - sum(held.values())

    def turn(claim: Claim, kept: bool, more: int) -> _Turn:
        overdue = not kept and granted[key_of(claim)] == claim.working and begun - claim.since >= MOST_PASSED
        # A gang that is kept is within its job's fair part as a whole or not at all.
        before = held[claim.job] + (claim.gpus * (more - 1) if kept and claim.together else 0)
        order = (claim.since, 0) if overdue else (0, before)
        return (-claim.priority, not overdue, *order, kept, claim.used, claim.job, -claim.place, claim.stage)

    def reserve(claim: Claim, gpus: int, total: int, others: Iterable[Claim]) -> _Reserve:
        """What others may have of `total` GPUs, of which a claim waits for some."""
        earlier = passing = 0
        for other in others:
            later = sum(order >= claim.since for order in other.begun)
            earlier += (other.working - later) * other.gpus
            passing += (granted[key_of(other)] - other.working + later) * other.gpus
        return _Reserve(claim.priority, total - gpus, earlier, passing)

    hungry = [(claim, False, claim.wanted - claim.working) for claim in sharers]
    hungry += [(claim, True, claim.kept) for claim in sharers]
    waiting = [(turn(*entry), *entry) for entry in hungry if entry[2] > 0]
    heapq.heapify(waiting)
    of_pool: _Reserve | None = None
    of_namespaces: dict[str, _Reserve] = {}
    while waiting:
        recorded, claim, kept, more = heapq.heappop(waiting)
        if recorded != turn(claim, kept, more):
            # Its job was given something since: its turn comes later now.
            heapq.heappush(waiting, (turn(claim, kept, more), claim, kept, more))
            continue
        count = more if claim.together else 1
        gpus, namespace = count * claim.gpus, claim.namespace
        reserves = [each for each in (of_pool, of_namespaces.get(namespace)) if each is not None]
        if (kept and reserves) or not all(each.lets_pass(claim, gpus) for each in reserves):
            continue
        quota = pool.namespaces.get(namespace)
        if quota is not None and in_namespace[namespace] + gpus > quota:
            if not kept and namespace not in of_namespaces:
                beside = [each for each in sharers if each.namespace == namespace]
                of_namespaces[namespace] = reserve(claim, gpus, quota, beside)
            continue
        if gpus > free:
            if not kept and of_pool is None:
                of_pool = reserve(claim, gpus, pool.gpus, sharers)
            continue
        granted[key_of(claim)] += count
        held[claim.job] += gpus
        in_namespace[namespace] += gpus
        free -= gpus
        for each in reserves:
            each.passing += gpus
        if more > count:
            heapq.heappush(waiting, (turn(claim, kept, more - count), claim, kept, more - count))
    return granted | {
        key_of(claim): max(claim.wanted, claim.working) + claim.kept for claim in claims if not claim.gpus
    }


def key_of(claim: Claim) -> tuple[str, str]:
    """What a claim is known by."""
    return claim.job, claim.stage


def check_feasible(claim: Claim, pool: Pool) -> None:
    """Return if an instance, or a gang, can run at all.

    Raises:
        ValueError: it is larger than the pool or its namespace's quota.
    """
    quota = min(pool.gpus, pool.namespaces.get(claim.namespace, pool.gpus))
    count = max(1, claim.wanted - claim.working) if claim.together else 1
    if claim.gpus * count > quota:
        one, gang = f"an instance of {claim.stage} asks", f"{count} instances of {claim.stage} that work together ask"
        raise ValueError(
            f"{gang if count > 1 else one} for {claim.gpus * count} GPUs, and namespace {claim.namespace} may have"
            f" {quota} of the pool's {pool.gpus}: ask for fewer a pod, or raise the quota"
        )
