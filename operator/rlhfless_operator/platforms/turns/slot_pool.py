"""The slots of one namespace, and the jobs whose pods take turns on them."""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlhfless_functions.api import STAGES, Stage
from rlhfless_operator.knative import ApiError, InvalidError, NotFoundError, UnavailableError
from rlhfless_operator.planner.pools.host_memory import pod_to_end
from rlhfless_operator.planner.pools.shortage import Shortage
from rlhfless_operator.planner.pools.turns import SlotUse, Turns, WaitingTask, take_turns
from rlhfless_operator.platforms.base import InstanceLostError, PlatformUnavailableError
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from rlhfless_operator.platforms.pool_member import PoolMember, parts_of
from rlhfless_operator.platforms.slots import SlotAccount
from rlhfless_operator.platforms.turns.slot_division import PoolDivision
from rlhfless_operator.platforms.turns.slot_users import Hope, SlotUser

_logger = logging.getLogger(__name__)

_REVIEW_SECONDS = 5.0
"""Seconds between checks of the claims."""
_KEPT_SECONDS = 30.0
"""Seconds that claims are kept after the last job. Getting them again takes about as long; without pods they hold no
GPU."""
_SCHEDULING_SECONDS = 15.0
"""Seconds that kube-scheduler may take to use freed memory: it retries a pod within 10 s."""
_TICK_SECONDS = 1.0
"""Seconds between checks of a stage with a waiting task, even without news."""


@dataclass(frozen=True)
class SlotShare:
    """A job's part in the slots of its namespace."""

    pool: "SlotPool"
    member: PoolMember


@dataclass
class _Part:
    """The part of a job that has joined."""

    user: SlotUser
    member: PoolMember
    shortages: dict[Stage, Shortage] = field(default_factory=dict)


@dataclass
class _QueuedTask:
    """A task whose turn has not come."""

    user: SlotUser
    stage: Stage
    task: WaitingTask


class SlotPool:
    """The slots of one namespace in one pool.

    Args:
        name: name of the pool.
        settings: settings of the pool, with a DeviceClass.
        division: the division of the pool among namespaces.
        jobs: the jobs of the pool; see `PoolMember.jobs`.
    """

    def __init__(
        self, namespace: str, name: str, settings: PoolSettings, division: PoolDivision, jobs: Sequence[PoolMember]
    ) -> None:
        self._division = division
        self._namespace = namespace
        self._name = name
        self._device_class = settings.device_class
        self._together = settings.gpus_per_group
        self._most = settings.share_of(namespace) // self._together
        self._gpus = settings.gpus
        self._account = SlotAccount()
        self._jobs = jobs
        self._owners: dict[str, SlotUser] = {}
        self._unsettled: set[str] = set()
        """Pods that an earlier driver may have left awake."""
        self._waiting: dict[int, _QueuedTask] = {}
        self._numbers = itertools.count(1)
        self._turns: Turns | None = None
        """The decision since the last change."""
        self._changed = asyncio.Condition()
        self._review: asyncio.Task[None] | None = None
        self._giving_back: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._made_room = -math.inf
        """Time when a pod was last seen that frees its node's memory."""

    # --- jobs ---

    @property
    def size(self) -> int:
        """Wanted number of slots for the jobs that have joined."""
        return self._division.part(self._namespace) * self._together

    async def join(self, user: SlotUser, member: PoolMember) -> None:
        """Let a job join, and create as many slots as it can use at a time, or as its namespace may have.

        Raises:
            PlatformUnavailableError: the job can never run here, the cluster has no claims or refuses them, or other
                namespaces already hold all of the pool's groups.
        """
        largest = max(member.gpus.values())
        if largest > self._together:
            raise PlatformUnavailableError(
                f"an instance requests {largest} GPUs, but pool {self._name} allocates {self._together} together"
                f" on a node; request fewer, or raise gpusPerGroup of the pool"
            )
        if self._most == 0:
            raise PlatformUnavailableError(
                f"namespace {self._namespace} has no GPUs of pool {self._name}; add it to the pool's namespaces"
            )
        # A later job has no claim to what the others got before it.
        used = min(self._use().used.values(), default=0.0)
        member.take_part(_Part(user, member), used)
        self._want()
        try:
            if self.size == 0:
                raise PlatformUnavailableError(
                    f"pool {self._name} has {self._gpus} GPUs in groups of {self._together}, and other namespaces hold"
                    " all groups; wait until their jobs have ended, or raise the pool's gpus"
                )
            await self._make_claims()
        except (ApiError, PlatformUnavailableError) as error:
            member.part = None
            self._want()
            if isinstance(error, PlatformUnavailableError):
                raise
            raise PlatformUnavailableError(self._explained(error)) from error
        if self._giving_back is not None:
            self._giving_back.cancel()
            self._giving_back = None
        if self._review is None:
            self._review = asyncio.create_task(self._look_after())

    def leave(self, user: SlotUser) -> None:
        """Remove a job. Slots that no job has needed for a while are returned."""
        parts = self._parts()
        part = parts.get(user.job)
        if part is not None and part.user is user:
            part.member.part = None
            self._want()
            del parts[user.job]
        if parts:
            return
        if self._review is not None:
            self._review.cancel()
            self._review = None
        if self._giving_back is None:
            self._giving_back = asyncio.create_task(self._give_back())

    def _parts(self) -> dict[str, _Part]:
        """Return the parts of the namespace's jobs that have joined, by the job's unique id."""
        return parts_of((each for each in self._jobs if each.namespace == self._namespace), _Part)

    # --- pods ---

    def arrived(self, user: SlotUser, pod: str, slots: Sequence[str], *, asleep: bool) -> None:
        """Add a pod. Unless it is known to be `asleep`, no pod wakes on its slots before it has slept."""
        self._owners[pod] = user
        self._account.place(pod, slots)
        if not asleep:
            self._unsettled.add(pod)
        self.notify()

    def slept(self, pod: str) -> None:
        """Record that a pod has released its slots."""
        self._account.sleep(pod)
        self._unsettled.discard(pod)
        self.notify()

    def gone(self, pod: str) -> None:
        """Remove a pod that is gone, or that no longer uses its slots."""
        self._owners.pop(pod, None)
        self._unsettled.discard(pod)
        self._account.leave(pod)
        self.notify()

    def knows(self, pod: str) -> bool:
        """Return whether a pod takes turns here."""
        return pod in self._account

    # --- turns ---

    async def acquire(self, user: SlotUser, stage: Stage, still_hoped_for: Hope, *, spare: bool = False) -> str:
        """Wait for a pod of a stage to get its turn, and return it. All other pods on its slots are asleep then.

        Args:
            still_hoped_for: called about once a second; returns why waiting is pointless.
            spare: whether the task takes only slots that no other task wants.

        Raises:
            InstanceLostError: waiting is pointless.
        """
        number = next(self._numbers)
        part = self._parts().get(user.job)
        priority = part.member.priority if part is not None else 0
        self._waiting[number] = _QueuedTask(
            user, stage, WaitingTask(number, user.job, (), priority, STAGES.index(stage), spare=spare)
        )
        self._turns = None
        try:
            while (pod := self._decided().granted.get(number)) is None:
                if (problem := still_hoped_for()) is not None:
                    raise InstanceLostError(problem)
                try:
                    async with asyncio.timeout(_TICK_SECONDS), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    self._turns = None
            self._account.wake(pod)
            user.take(pod)
            self._pass(number, priority)
            return pod
        finally:
            del self._waiting[number]
            if not self._waiting:
                self._note_shortages(())
            self.notify()

    def notify(self) -> None:
        """Wake waiting tasks after a change."""
        self._turns = None
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _decided(self) -> Turns:
        """Decide whose turn it is now. Ask pods in the way to sleep, once."""
        turns = self._turns
        if turns is None:
            waiting = [replace(each.task, instances=self._able(each)) for each in self._waiting.values()]
            turns = self._turns = take_turns(waiting, self._use())
            for pod in turns.sleeps:
                self._owners[pod].put_to_sleep(pod)
            self._note_shortages([self._waiting[number] for number in turns.lacking])
        return turns

    def _note_shortages(self, lacking: Sequence[_QueuedTask]) -> None:
        """Record tasks that wait for their pods' slots while other slots are free.

        After the time that a start takes, start one more pod.
        """
        now = time.monotonic()
        counts = Counter((each.user.job, each.stage) for each in lacking)
        for job, part in self._parts().items():
            for stage in STAGES:
                start_seconds = part.user.could_start(stage) if counts[job, stage] else None
                shortage = part.shortages.setdefault(stage, Shortage(now))
                waited = shortage.observe(0 if start_seconds is None else counts[job, stage], now)
                if start_seconds is not None and waited >= start_seconds:
                    shortage.started()
                    part.user.start(stage)

    def _able(self, waiting: _QueuedTask) -> list[str]:
        pods = [*waiting.user.free(waiting.stage), *waiting.user.asleep(waiting.stage)]
        return [pod for pod in pods if pod in self._account]

    def _use(self) -> SlotUse:
        parts = self._parts()
        users = [part.user for part in parts.values()]
        idle = {pod for user in users for pod in user.idle()}
        leaving = {pod for user in users for pod in user.leaving()}
        held = dict.fromkeys(parts, 0)
        for holder in self._account.holders.values():
            if holder is not None and holder not in idle and holder not in leaving:
                job = self._owners[holder].job
                held[job] = held.get(job, 0) + 1
        now = time.monotonic()
        return SlotUse(
            homes=self._account.homes,
            holders=self._account.holders,
            jobs={pod: owner.job for pod, owner in self._owners.items()},
            idle=idle,
            leaving=leaving,
            closed={slot for pod in self._unsettled for slot in self._account.of(pod)},
            used={job: part.member.use.add(held[job], now) for job, part in parts.items()},
        )

    def _pass(self, number: int, priority: int) -> None:
        """Record that a task's turn has come, and that it passed earlier tasks of its priority."""
        for each in self._waiting.values():
            if each.task.number < number and each.task.priority == priority:
                each.task = replace(each.task, passed=each.task.passed + 1)

    # --- claims ---

    def _want(self) -> None:
        wanted = sum(-(-part.member.most_at_once // self._together) for part in self._parts().values())
        self._division.want(self._namespace, wanted)

    async def _make_claims(self) -> None:
        review = await self._division.review(self._namespace)
        for part in self._parts().values():
            part.user.reviewed(review)

    async def _give_back(self) -> None:
        await asyncio.sleep(_KEPT_SECONDS)
        self._giving_back = None
        try:
            await self._division.give_back(self._namespace)
        except ApiError as error:
            _logger.warning(
                "slots of %s could not be deleted; they stay without pods: %s", self._namespace, self._explained(error)
            )

    async def _look_after(self) -> None:
        """Create deleted claims again, as long as there are jobs."""
        while True:
            await asyncio.sleep(_REVIEW_SECONDS)
            try:
                await self._make_claims()
                self._make_room()
            except UnavailableError as error:
                _logger.warning("slots of %s: %s", self._namespace, self._explained(error))
            except ApiError as error:
                for part in self._parts().values():
                    part.user.trouble(self._explained(error))

    def _make_room(self) -> None:
        """End a pod without a task if a pod with a waiting task lacks memory on the node."""
        waiting = {(each.user.job, each.stage) for each in self._waiting.values()}
        parts = self._parts().values()
        pods = [replace(pod, priority=part.member.priority) for part in parts for pod in part.user.node_mates()]
        now = time.monotonic()
        if any(pod.state == "ending" for pod in pods):
            self._made_room = now
        if now < self._made_room + _SCHEDULING_SECONDS:
            return
        chosen = pod_to_end(pods, waiting)
        if chosen is not None:
            self._made_room = now
            _logger.warning("%s has no task and is ended: a pod with a waiting task lacks memory on its node", chosen)
            self._owners[chosen].end(chosen)

    def _explained(self, error: ApiError) -> str:
        match error:
            case NotFoundError():
                return (
                    f"pool {self._name} has deviceClass {self._device_class}, but the cluster has no ResourceClaims of"
                    " resource.k8s.io/v1; upgrade to Kubernetes 1.34 or newer, or install the chart without deviceClass"
                )
            case InvalidError():
                return f"pool {self._name}: the API server refuses its ResourceClaims: {error.message}"
            case _:
                return f"the slots of pool {self._name} in namespace {self._namespace}: {error}"
