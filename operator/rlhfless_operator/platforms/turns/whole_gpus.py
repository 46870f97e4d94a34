"""A pool whose slots are whole GPUs: its pods do not sleep, and hold their slots until they end.

The hook of each job asks the pool before an instance starts or a task is sent.
"""

import asyncio
import math
import time
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rlhfless_functions.api import STAGES, Gang, LearnRequest, Preload, RunRequest, Stage
from rlhfless_operator.planner.pools.sharing import Pool, SlotRequest, check_feasible, share
from rlhfless_operator.planner.pools.whole_gpus import Contender, keeps_any, next_turns, turn_seconds
from rlhfless_operator.platforms.base import Platform, PlatformUnavailableError
from rlhfless_operator.platforms.job_platform import ClusterPlatform, Hook
from rlhfless_operator.platforms.pool_member import Clock, PoolMember, parts_of

Waits = Callable[["WaitingJob | None"], None]
"""Called when the jobs that a job waits for change; with None when it no longer waits."""


@dataclass(frozen=True)
class Holder:
    """A job that has its turn on the slots of a pool."""

    namespace: str
    name: str
    gpus: int
    """GPUs that it holds."""


@dataclass(frozen=True)
class WaitingJob:
    """A job waits for its turn on the slots of a pool."""

    gpus: int
    """GPUs that it waits for."""
    holders: Sequence[Holder]
    """Jobs that have their turn."""
    seconds: float
    """Seconds until the first of these yields to a job of the same priority; it may finish earlier."""

    def message(self, pool: str, namespace: str) -> str:
        """Return the message for the job's user.

        Args:
            pool: name of the pool.
            namespace: namespace of the user. The message does not name jobs of other namespaces.
        """
        held = ", ".join(
            f"{f'job {each.name}' if each.namespace == namespace else 'a job of another namespace'} holds {each.gpus}"
            for each in self.holders
        )
        minutes = math.ceil(self.seconds / 60)
        return (
            f"waits for its turn on {self.gpus} GPUs of pool {pool}: {held}, for {minutes} min more or until it is"
            " done; a higher spec.priority goes first"
        )


class WholeGpuPool:
    """The slots of one pool, and the jobs that take turns on them.

    Args:
        pool: its size and the namespaces' quotas.
        jobs: the jobs of the pool; see `PoolMember.jobs`.
        clock: monotonic seconds.
    """

    def __init__(self, pool: Pool, jobs: Sequence[PoolMember], clock: Clock = time.monotonic) -> None:
        self._pool = pool
        self._jobs = jobs
        self._clock = clock
        self._turn_ends: asyncio.TimerHandle | None = None
        self.begun = 0
        """Tasks that its jobs have begun."""

    def join(self, member: PoolMember, part: "WholeGpus") -> int:
        """Let a job join the pool, and return the most GPUs that it may request at a time.

        Raises:
            PlatformUnavailableError: one of its instances, or a gang, needs more GPUs than the pool or its namespace's
                quota has.
        """
        for stage, count in member.gpus.items():
            most, together = member.instances.get(stage, 1), stage in member.together
            try:
                check_feasible(
                    SlotRequest(member.uid, stage, member.namespace, count, 0, most, together=together), self._pool
                )
            except ValueError as error:
                raise PlatformUnavailableError(f"pool {member.pool}: {error}") from error
        member.take_part(part)
        quota = self._pool.namespaces.get(member.namespace, self._pool.gpus)
        return min(sum(map(member.most, member.gpus)), quota, self._pool.gpus)

    def leave(self, member: PoolMember, part: "WholeGpus") -> None:
        """Remove a job if it has joined; the others share its part."""
        if member.part is part:
            member.part = None
            self.divide()

    def divide(self) -> None:
        """Decide anew which jobs have their turn and how many slots each holds, and tell each job its changes."""
        now, parts = self._clock(), parts_of(self._jobs, WholeGpus)
        requests = {uid: part.requests() for uid, part in parts.items()}
        contenders = [parts[uid].contends(asked, now) for uid, asked in requests.items()]
        asking = [each for each in contenders if each is not None]
        turns = next_turns(asking, self._pool, now)
        for contender in asking:
            parts[contender.job].has_turn(contender.job in turns, now)
        self._tell(parts, asking, turns, now)
        without = {each.job for each in asking} - turns
        allowed = [
            replace(request, wanted=request.working, kept=0) if uid in without and request.gpus else request
            for uid, asked in requests.items()
            for request in asked
        ]
        grants = share(allowed, self._pool, self.begun)
        for uid, part in parts.items():
            part.granted({stage: count for (owner, stage), count in grants.items() if owner == uid})

    def _tell(
        self, parts: "Mapping[str, WholeGpus]", asking: Sequence[Contender], turns: frozenset[str], now: float
    ) -> None:
        """Tell waiting jobs for which jobs they wait, and check again when the first turn is over."""
        if self._turn_ends is not None:
            self._turn_ends.cancel()
            self._turn_ends = None
        having = [each for each in asking if each.job in turns]
        holders = [Holder(each.namespace, parts[each.job].member.name, each.gpus) for each in having]
        ends = [parts[each.job].since + turn_seconds(asking) for each in having]
        left = min((end - now for end in ends if end > now), default=0.0)
        waiting = {each.job: each for each in asking if each.job not in turns}
        for uid, part in parts.items():
            part.waits(WaitingJob(waiting[uid].gpus, holders, left) if uid in waiting else None)
        if waiting and left > 0:
            self._turn_ends = asyncio.get_running_loop().call_later(left, self.divide)


@dataclass
class _WaitingTasks:
    """Tasks that begin together: one, or those of a gang."""

    size: int
    """Number of the tasks."""
    since: int
    """Number of tasks that the pool had begun when they came."""
    there: int = 0
    """Number of them that have come. They request nothing until all have come."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the pool allows all of them."""
    order: int = 0
    """Number of tasks that the pool had begun before them, once it allows them."""

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return self.there == self.size


class WholeGpus(Hook):
    """The slots of one job: the hook that limits its platform. The job joins the pool when the platform is open.

    The platform must have no keep-alive: only the pool decides which instances are kept.

    Args:
        on_wait: called with the jobs that this job waits for.
    """

    def __init__(self, pool: WholeGpuPool, member: PoolMember, on_wait: Waits = lambda waiting: None) -> None:
        self.member = member
        self._pool = pool
        self._on_wait = on_wait
        self._platform: Platform | None = None
        self._most = 0
        """Most GPUs that it may request at a time. It counts as requesting them until each of its stages has
        requested."""
        self._clock = member.clock
        self._held: dict[Stage, deque[tuple[float, int]]] = {}
        self._preloads: dict[Stage, Preload | None] = {}
        self._begun: dict[Stage, list[int]] = defaultdict(list)
        """Number of tasks that the pool had begun before each task at work."""
        self._waiting: dict[Stage, dict[str, _WaitingTasks]] = defaultdict(dict)
        """Waiting tasks in their order, by the gang's meeting, or by a unique name."""
        self._served: dict[Stage, int] = {}
        """Number of tasks that the pool had begun when each stage's last task began."""
        self._granted: dict[Stage, int] = {}
        self._applied: dict[Stage, int] = {}
        self._applying = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._used = 0.0
        self.since = 0.0
        """Time when its turn, or its wait for a turn, began."""
        self._has_turn: bool | None = None
        self._asked: set[str] = set()
        self._peak = 0
        self._waits_for: WaitingJob | None = None

    # --- what the job's platform calls ---

    @asynccontextmanager
    async def opening(self, platform: ClusterPlatform) -> AsyncIterator[None]:
        """Join the pool once the platform is open.

        Raises:
            PlatformUnavailableError: the job can never run in the pool.
        """
        yield
        self._platform, self._most = platform, self._pool.join(self.member, self)

    async def hold(self, stage: Stage, count: int, preload: Preload | None) -> bool:
        """Set the wanted number of instances; the pool limits how many are held."""
        holds = self._held.setdefault(stage, deque())
        if holds:
            # The previous number counts until now.
            holds.append((self._clock(), holds.pop()[1]))
        holds.append((self._clock(), count))
        self._preloads[stage] = preload
        self._applied.pop(stage, None)
        self._pool.divide()
        if keep_alive := self.member.keep_alive.get(stage, 0.0):
            loop = asyncio.get_running_loop()
            self._timers = [timer for timer in self._timers if timer.when() > loop.time()]
            self._timers.append(loop.call_later(keep_alive, self._pool.divide))
        await self._apply()
        return True

    @asynccontextmanager
    async def task(self, request: RunRequest) -> AsyncIterator[None]:
        """Send a task to an instance as soon as the pool allows another one."""
        stage = request.key.stage
        admitted = await self._admit(stage, request.gang if isinstance(request, LearnRequest) else None)
        try:
            yield
        finally:
            self._end(stage, admitted)

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        """Leave the pool once every instance has ended."""
        for timer in self._timers:
            timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        try:
            yield
        finally:
            self._pool.leave(self.member, self)

    # --- what the pool calls ---

    def requests(self) -> list[SlotRequest]:
        """Return what the job's stages request now."""
        self._charge()
        return [self._slot_request(stage) for stage in {*self._held, *self._waiting, *self._begun}]

    def contends(self, requests: Sequence[SlotRequest], now: float) -> Contender | None:
        """Return the job as a contender for slots; None while it requests none and gives up its turn."""
        asked = {request.stage: (request.wanted + request.kept) * request.gpus for request in requests if request.gpus}
        if not any(asked.values()):
            self._has_turn = None
            return None
        if self._has_turn is None:
            self._has_turn, self.since = False, now
        self._asked |= {stage for stage, gpus in asked.items() if gpus}
        self._peak = max(self._peak, sum(asked.values()))
        stages = [stage for stage, gpus in self.member.gpus.items() if gpus]
        known = self._asked.issuperset(stages)
        costs = [self.member.costs(stage) for stage in stages]
        leaving = any(cost.over for cost in costs)
        return Contender(
            job=self.member.uid,
            namespace=self.member.namespace,
            gpus=0 if leaving else min(self._peak, self._most) if known else self._most,
            since=self.since,
            has_turn=self._has_turn,
            priority=self.member.priority,
            switch_seconds=max((cost.seconds for cost in costs), default=0.0),
            keeps=keeps_any(costs),
        )

    def has_turn(self, has_turn: bool, now: float) -> None:
        """Record whether the job has its turn."""
        if has_turn != self._has_turn:
            self._has_turn, self.since = has_turn, now

    def waits(self, waiting: WaitingJob | None) -> None:
        """Record which jobs it waits for."""
        before, self._waits_for = self._waits_for, waiting
        if (before and before.holders) != (waiting and waiting.holders):
            self._on_wait(waiting)

    def granted(self, grants: Mapping[str, int]) -> None:
        """Apply a new division of the pool."""
        self._granted = {stage: grants[stage] for stage in STAGES if stage in grants}
        self._charge()
        for stage, count in self._granted.items():
            for name, waiters in list(self._waiting[stage].items()):
                # Start all of a gang together: the next grant may be smaller.
                if waiters.complete and len(self._begun[stage]) + waiters.size <= count:
                    del self._waiting[stage][name]
                    self._begun[stage] += [self._pool.begun] * waiters.size
                    waiters.order = self._pool.begun
                    self._pool.begun += waiters.size
                    self._served[stage] = self._pool.begun
                    waiters.admitted.set()
        if any(self._applied.get(stage) != count for stage, count in self._granted.items()):
            self._spawn(self._apply())

    def _slot_request(self, stage: Stage) -> SlotRequest:
        working = len(self._begun[stage])
        waiting = [waiters for waiters in self._waiting[stage].values() if waiters.complete]
        together = stage in self.member.together or any(waiters.size > 1 for waiters in waiting)
        # Request one gang at a time: two together may not fit.
        wanted = working + sum(waiters.size for waiters in (waiting[:1] if together else waiting))
        holds = self._held.get(stage, deque())
        oldest = self._clock() - self.member.keep_alive.get(stage, 0.0)
        while len(holds) > 1 and holds[0][0] <= oldest:
            holds.popleft()
        return SlotRequest(
            job=self.member.uid,
            stage=stage,
            namespace=self.member.namespace,
            gpus=self.member.gpus.get(stage, 0),
            working=working,
            wanted=wanted,
            kept=max(0, max((count for _, count in holds), default=0) - wanted),
            priority=self.member.priority,
            used=self._used,
            place=STAGES.index(stage),
            together=together,
            since=max(waiting[0].since if waiting else 0, self._served.get(stage, 0)),
            begun=tuple(self._begun[stage]),
        )

    async def _admit(self, stage: Stage, gang: Gang | None) -> _WaitingTasks:
        """Wait until the pool allows a task, with all others of its gang."""
        name = gang.meeting if gang is not None else uuid.uuid4().hex
        fresh = _WaitingTasks(gang.size if gang is not None else 1, self._pool.begun)
        waiters = self._waiting[stage].setdefault(name, fresh)
        waiters.there += 1
        try:
            self._pool.divide()
            await waiters.admitted.wait()
        except BaseException:
            if waiters.admitted.is_set():
                self._end(stage, waiters)
            else:
                waiters.there -= 1
                if not waiters.there:
                    del self._waiting[stage][name]
                self._pool.divide()
            raise
        return waiters

    def _end(self, stage: Stage, waiters: _WaitingTasks) -> None:
        self._charge()
        self._begun[stage].remove(waiters.order)
        self._pool.divide()

    async def _apply(self) -> None:
        assert self._platform is not None, "the job joins once its platform is open"
        async with self._applying:
            for stage, count in list(self._granted.items()):
                if self._applied.get(stage) != count:
                    self._applied[stage] = count
                    await self._platform.hold(stage, count, self._preloads.get(stage))

    def _charge(self) -> None:
        gpus = sum(len(begun) * self.member.gpus.get(stage, 0) for stage, begun in self._begun.items())
        self._used = self.member.use.add(gpus, self._clock())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
