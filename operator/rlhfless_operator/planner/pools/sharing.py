"""The division of whole GPUs among the jobs that have their turn (`whole_gpus`): how many instances each may have."""

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
    """Most GPUs of the pool that the jobs of a namespace hold at a time; all of them for a namespace not named here."""


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
    """Slots (GPUs) of one instance."""
    working: int
    """Number of instances with a task. They are never taken away."""
    wanted: int
    """Number of instances that have a task, or for which a task waits."""
    kept: int = 0
    """Number of further instances that are useful: warmed for work to come, or kept because of their loaded state."""
    priority: int = 0
    """The higher comes first."""
    used: float = 0.0
    """GPU-seconds that the job has had lately; among equals the one with the fewest comes first."""
    place: int = 0
    """Place of its stage in the step. Of one job's stages the one nearest to the step's end comes first."""
    together: bool = False
    """Whether its instances only work together, like a gang of learners. Those that wait for a task get their GPUs all
    at once, and so do those that are kept."""
    since: int = 0
    """Number of tasks that the pool had begun when the request began to wait, or when its last task began."""
    begun: Sequence[int] = ()
    """Number of tasks that the pool had begun before each of its working tasks; those left out came first of all."""


@dataclass
class _Reserve:
    """Slots of a pool, or of a quota, that others may have while a request waits that does not fit into the rest."""

    priority: int
    """Priority of the request that waits; a higher one passes it."""
    room: int
    """GPUs left beside it."""
    earlier: int
    """GPUs of the tasks that began before it waited."""
    passing: int
    """GPUs of the tasks that have begun since."""

    def lets_pass(self, request: SlotRequest, gpus: int) -> bool:
        """Return whether `request` may go before the one that waits.

        It may if its priority is higher, or if the other could not begin now in any case and is not delayed by it.
        """
        return request.priority > self.priority or (self.earlier > self.room and self.passing + gpus <= self.room)


def share(requests: Sequence[SlotRequest], pool: Pool, begun: int = 0) -> dict[tuple[str, str], int]:
    """Return how many instances each request may have now.

    Working instances stay. The other GPUs go, one instance or gang at a time, to a request by this order:

    1. the job of the highest priority;
    2. the job that holds the fewest GPUs (max-min fairness);
    3. tasks that wait before instances that are kept. So a kept instance gives way to work of its own job, and to work
       of jobs that hold no more than its own. But a job within its fair part keeps its learner in memory;
    4. the job that has used the fewest GPU-seconds;
    5. within a job, the stage nearest to the end of its step.

    A request that `MOST_PASSED` tasks have passed comes before all others of its priority; among these the one that has
    waited longest comes first. So none waits for ever.

    The first request that does not fit into the free GPUs gets those that become free. Smaller requests pass it until
    the tasks that began before it have left enough. Together they never have more than it leaves of the pool: it waits
    only for the tasks that it found. A request without room in its namespace's quota delays that namespace alone.
    Requests without GPUs never wait.

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
            # Its job has got slots since, so it comes later now.
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
    """The division of a pool's GPUs so far."""

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
            kept: whether it is for instances that are kept, not for tasks.
            more: number of instances that it still lacks.
        """
        overdue = self.granted[key_of(request)] == request.working and self._begun - request.since >= MOST_PASSED
        overdue = overdue and not kept
        # A gang that is kept is within its job's fair part as a whole or not at all.
        before = self._held[request.job] + (request.gpus * (more - 1) if kept and request.together else 0)
        order = (request.since, 0) if overdue else (0, before)
        return (-request.priority, not overdue, *order, kept, request.used, request.job, -request.place, request.stage)

    def grant(self, request: SlotRequest, count: int, *, kept: bool) -> bool:
        """Give a request `count` instances, and return True; return False if it can have none."""
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
        """Return the reserve of `total` GPUs while a request waits for some of them."""
        earlier = passing = 0
        for other in others:
            later = sum(order >= request.since for order in other.begun)
            earlier += (other.working - later) * other.gpus
            passing += (self.granted[key_of(other)] - other.working + later) * other.gpus
        return _Reserve(request.priority, total - gpus, earlier, passing)


def key_of(request: SlotRequest) -> tuple[str, str]:
    """Return the key of a request: its job and its stage."""
    return request.job, request.stage


def check_feasible(request: SlotRequest, pool: Pool) -> None:
    """Check that an instance, or a gang, can run at all.

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
