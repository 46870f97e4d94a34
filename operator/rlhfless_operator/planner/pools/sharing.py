"""The jobs whose turn it is (`whole_gpus.py`) share whole GPUs: the instances that hold these slots now."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhfless_operator.planner.pools.turns import MOST_PASSED

_Key = tuple[int, bool, int, int, bool, float, str, int, str]
"""The lower comes first; see `share`."""


@dataclass(frozen=True)
class Pool:
    """GPUs that jobs share."""

    gpus: int
    """GPUs of the pool."""
    namespaces: Mapping[str, int] = field(default_factory=dict)
    """Most GPUs of the pool that the jobs of a namespace hold at a time; all of them where it is not named."""


@dataclass(frozen=True)
class SlotRequest:
    """The slots that one stage of one job requests."""

    job: str
    """Unique id of the job."""
    stage: str
    """The stage; a job has at most one request for each."""
    namespace: str
    """Namespace whose quota the job counts against."""
    gpus: int
    """Slots of one instance: GPUs."""
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
    """Slots that others may have of a pool, or of a quota, while a request waits that is too large for the rest."""

    priority: int
    """Of the request that waits; a higher one passes it."""
    room: int
    """GPUs that are left beside it."""
    earlier: int
    """GPUs of the tasks that began before it waited."""
    passing: int
    """GPUs of the tasks that have begun since."""

    def lets_pass(self, request: SlotRequest, gpus: int) -> bool:
        """Whether it could not begin anyway, and will not begin later for this."""
        return request.priority > self.priority or (self.earlier > self.room and self.passing + gpus <= self.room)


def share(requests: Sequence[SlotRequest], pool: Pool, begun: int = 0) -> dict[tuple[str, str], int]:
    """Return how many instances each request may have now.

    Working instances stay. Then GPUs go one instance at a time, or one gang, to the job of the highest priority, among
    equals to the one that holds the fewest GPUs: max-min fairness. Then come tasks that wait before instances that are
    kept (so a kept instance gives way to work of its own job, and to work of jobs that hold no more than its own, but a
    job within its fair part keeps its learner in memory), then jobs that have used the fewest GPU-seconds. Within a job
    the stage that is nearest to the end of its step comes first. A request that `MOST_PASSED` tasks have passed comes
    before all others of its priority, the one that has waited longest first. So none waits for ever.

    The first request that is larger than what is left gets what becomes free. Until the tasks that began before it have
    left enough, smaller ones pass it. Together they never have more than it leaves of the pool: while it is the first,
    it waits no longer than for the tasks that it found. A request that its namespace's quota has no room for holds up
    that namespace alone. What needs no GPU is not held up at all.

    Args:
        begun: tasks that the pool has begun so far.

    Raises:
        ValueError: an instance, or a gang, is larger than the pool or its namespace's quota, and could never run.
    """
    for request in requests:
        check_feasible(request, pool)
    sharers = [request for request in requests if request.gpus]
    division = _Division(sharers, pool, begun)
    hungry = [(request, False, request.wanted - request.working) for request in sharers]
    hungry += [(request, True, request.kept) for request in sharers]
    waiting = [(division.key(*entry), *entry) for entry in hungry if entry[2] > 0]
    heapq.heapify(waiting)
    while waiting:
        recorded, request, kept, more = heapq.heappop(waiting)
        if recorded != (key := division.key(request, kept, more)):
            # Its job was given something since: it comes later now.
            heapq.heappush(waiting, (key, request, kept, more))
            continue
        count = more if request.together else 1
        if division.grant(request, count, kept=kept) and more > count:
            more -= count
            heapq.heappush(waiting, (division.key(request, kept, more), request, kept, more))
    return division.granted | {
        key_of(request): max(request.wanted, request.working) + request.kept for request in requests if not request.gpus
    }


class _Division:
    """The GPUs of a pool, as far as they are given out."""

    def __init__(self, sharers: Sequence[SlotRequest], pool: Pool, begun: int) -> None:
        self._sharers, self._pool, self._begun = sharers, pool, begun
        self.granted = {key_of(request): request.working for request in sharers}
        self._held: dict[str, int] = defaultdict(int)
        self._in_namespace: dict[str, int] = defaultdict(int)
        for request in sharers:
            self._held[request.job] += request.working * request.gpus
            self._in_namespace[request.namespace] += request.working * request.gpus
        self._free = pool.gpus - sum(self._held.values())
        self._of_pool: _Reserve | None = None
        self._of_namespaces: dict[str, _Reserve] = {}

    def key(self, request: SlotRequest, kept: bool, more: int) -> _Key:
        """Return a request's place in the order.

        Args:
            kept: whether it is for instances that are good to have.
            more: instances that it still lacks.
        """
        overdue = self.granted[key_of(request)] == request.working and self._begun - request.since >= MOST_PASSED
        overdue = overdue and not kept
        # A gang that is kept is within its job's fair part as a whole or not at all.
        before = self._held[request.job] + (request.gpus * (more - 1) if kept and request.together else 0)
        order = (request.since, 0) if overdue else (0, before)
        return (-request.priority, not overdue, *order, kept, request.used, request.job, -request.place, request.stage)

    def grant(self, request: SlotRequest, count: int, *, kept: bool) -> bool:
        """Give a request so many instances; return False if there is nothing for it, now or later."""
        gpus, namespace = count * request.gpus, request.namespace
        reserves = [each for each in (self._of_pool, self._of_namespaces.get(namespace)) if each is not None]
        if (kept and reserves) or not all(each.lets_pass(request, gpus) for each in reserves):
            return False
        quota = self._pool.namespaces.get(namespace)
        if quota is not None and self._in_namespace[namespace] + gpus > quota:
            if not kept and namespace not in self._of_namespaces:
                beside = [each for each in self._sharers if each.namespace == namespace]
                self._of_namespaces[namespace] = self._reserve(request, gpus, quota, beside)
            return False
        if gpus > self._free:
            if not kept and self._of_pool is None:
                self._of_pool = self._reserve(request, gpus, self._pool.gpus, self._sharers)
            return False
        self.granted[key_of(request)] += count
        self._held[request.job] += gpus
        self._in_namespace[namespace] += gpus
        self._free -= gpus
        for each in reserves:
            each.passing += gpus
        return True

    def _reserve(self, request: SlotRequest, gpus: int, total: int, others: Iterable[SlotRequest]) -> _Reserve:
        """Return what others may have of `total` GPUs, of which a request waits for some."""
        earlier = passing = 0
        for other in others:
            later = sum(order >= request.since for order in other.begun)
            earlier += (other.working - later) * other.gpus
            passing += (self.granted[key_of(other)] - other.working + later) * other.gpus
        return _Reserve(request.priority, total - gpus, earlier, passing)


def key_of(request: SlotRequest) -> tuple[str, str]:
    """Return what a request is known by."""
    return request.job, request.stage


def check_feasible(request: SlotRequest, pool: Pool) -> None:
    """Return if an instance, or a gang, can run at all.

    Raises:
        ValueError: it is larger than the pool or its namespace's quota.
    """
    quota = min(pool.gpus, pool.namespaces.get(request.namespace, pool.gpus))
    count = max(1, request.wanted - request.working) if request.together else 1
    if request.gpus * count > quota:
        who = f"{count} instances of {request.stage} that work together ask"
        if count == 1:
            who = f"an instance of {request.stage} asks"
        raise ValueError(
            f"{who} for {request.gpus * count} GPUs, and namespace {request.namespace} may have"
            f" {quota} of the pool's {pool.gpus}: ask for fewer a pod, or raise the quota"
        )
