"""The slots of one namespace, and the jobs whose pods take turns on them."""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rlhfless_functions.api import STAGES, Stage
from rlhfless_operator.knative import (
    ApiError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from rlhfless_operator.planner.host_memory import NodeMate, pod_to_end
from rlhfless_operator.planner.shortage import Shortage
from rlhfless_operator.planner.turns import SlotUse, Turns, WaitingTask, take_turns
from rlhfless_operator.planner.usage import RecentUse
from rlhfless_operator.platforms.base import InstanceLostError, PlatformUnavailableError
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from rlhfless_operator.platforms.slot_division import ClaimsReview, PoolDivision
from rlhfless_operator.platforms.slots import SlotAccount

_logger = logging.getLogger(__name__)

_REVIEW_SECONDS = 5.0
"""Between two looks at the claims."""
_KEPT_SECONDS = 30.0
"""How long claims are kept after the last job: to get them again takes about as long. Without pods they hold no GPU."""
_SCHEDULING_SECONDS = 15.0
"""How long the scheduler of Kubernetes may take to use memory that was freed: it tries a pod again within 10 s."""
_TICK_SECONDS = 1.0
"""Between two looks at a stage whose task waits, though nothing was heard."""


class SlotUser(Protocol):
    """A job whose pods take turns."""

    @property
    def job(self) -> str:
        """Unique id of the job."""

    def free(self, stage: Stage) -> Sequence[str]:
        """Pods of a stage that are awake and have no task."""

    def asleep(self, stage: Stage) -> Sequence[str]:
        """Pods of a stage that sleep and could take a task."""

    def idle(self) -> Sequence[str]:
        """Pods of any stage that are awake and have no task."""

    def leaving(self) -> Sequence[str]:
        """Pods of any stage that give their slots back already."""

    def take(self, pod: str) -> None:
        """A task comes to a pod."""

    def put_to_sleep(self, pod: str) -> None:
        """Another pod needs its slots."""

    def could_start(self, stage: Stage) -> float | None:
        """Seconds that one more pod of a stage takes to start; None if the stage can't have one more now."""

    def start(self, stage: Stage) -> None:
        """Have one more pod of a stage: its tasks have waited for long while there were slots that no task wanted."""

    def reviewed(self, claims: ClaimsReview) -> None:
        """The claims were looked at."""

    def node_mates(self) -> Sequence[NodeMate]:
        """All pods, as far as it matters to those on the same nodes."""

    def end(self, pod: str) -> None:
        """A pod without a task makes room for another one in its node's memory."""

    def trouble(self, problem: str) -> None:
        """What keeps slots from being there; empty when nothing does any more."""


@dataclass(frozen=True)
class SlotShare:
    """A job's part in the slots of its namespace."""

    pool: "SlotPool"
    gpus: int
    """Most GPUs that it can use at a time."""
    largest: int
    """GPUs of its largest instance."""
    priority: int = 0
    """The higher comes first."""


@dataclass
class _Member:
    """A job that has joined."""

    user: SlotUser
    share: SlotShare
    use: RecentUse
    shortages: dict[Stage, Shortage] = field(default_factory=dict)


@dataclass
class _Waiting:
    """A task whose turn has not come."""

    user: SlotUser
    stage: Stage
    task: WaitingTask


class SlotPool:
    """The slots of one namespace in one pool.

    Args:
        name: of the pool.
        settings: of the pool; it names a DeviceClass.
        division: of the pool among its namespaces.
    """

    def __init__(self, namespace: str, name: str, settings: PoolSettings, division: PoolDivision) -> None:
        self._division = division
        self._namespace = namespace
        self._name = name
        self._device_class = settings.device_class
        self._together = settings.gpus_per_group
        self._most = settings.share_of(namespace) // self._together
        self._gpus = settings.gpus
        self._account = SlotAccount()
        self._users: dict[str, _Member] = {}
        self._owners: dict[str, SlotUser] = {}
        self._unsettled: set[str] = set()
        """Pods that an earlier driver may have left awake."""
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count(1)
        self._turns: Turns | None = None
        """What was decided since something last changed."""
        self._changed = asyncio.Condition()
        self._review: asyncio.Task[None] | None = None
        self._giving_back: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._made_room = -math.inf
        """When a pod was last seen that made room in its node's memory."""

    # --- jobs ---

    @property
    def size(self) -> int:
        """Slots that there are to be for the jobs that have joined."""
        return self._division.part(self._namespace) * self._together

    async def join(self, user: SlotUser, share: SlotShare) -> None:
        """Let a job in, and make as many slots as it can use at a time, or as its namespace may have.

        Raises:
            PlatformUnavailableError: it can never run here, or the cluster has no claims, or refuses them, or as many
                other namespaces as the pool has groups came first.
        """
        if share.largest > self._together:
            raise PlatformUnavailableError(
                f"an instance asks for {share.largest} GPUs, and pool {self._name} allocates {self._together} together"
                f" on a node; ask for fewer, or have gpusPerGroup of the pool raised"
            )
        if self._most == 0:
            raise PlatformUnavailableError(
                f"namespace {self._namespace} has no GPUs of pool {self._name}; have it named in the pool's namespaces"
            )
        # A job that comes later has no claim to what the others had before.
        used = min(self._use().used.values(), default=0.0)
        self._users[user.job] = _Member(user, share, RecentUse(time.monotonic(), used))
        self._want()
        try:
            if self.size == 0:
                raise PlatformUnavailableError(
                    f"pool {self._name} has {self._gpus} GPUs, {self._together} together, and as many other namespaces"
                    " have some of them; wait until their jobs have ended, or give the pool more gpus"
                )
            await self._make_claims()
        except (ApiError, PlatformUnavailableError) as error:
            self._users.pop(user.job, None)
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
        """Let a job go. Slots that no job has needed for a while are given back."""
        member = self._users.get(user.job)
        if member is not None and member.user is user:
            del self._users[user.job]
            self._want()
        if self._users:
            return
        if self._review is not None:
            self._review.cancel()
            self._review = None
        if self._giving_back is None:
            self._giving_back = asyncio.create_task(self._give_back())

    # --- pods ---

    def arrived(self, user: SlotUser, pod: str, slots: Sequence[str], *, asleep: bool) -> None:
        """A pod is there. Unless it is known to be `asleep`, no pod wakes on its slots before it has slept."""
        self._owners[pod] = user
        self._account.place(pod, slots)
        if not asleep:
            self._unsettled.add(pod)
        self.notify()

    def slept(self, pod: str) -> None:
        """A pod has given its slots back."""
        self._account.sleep(pod)
        self._unsettled.discard(pod)
        self.notify()

    def gone(self, pod: str) -> None:
        """A pod is no more, or has nothing of its slots any more."""
        self._owners.pop(pod, None)
        self._unsettled.discard(pod)
        self._account.leave(pod)
        self.notify()

    def knows(self, pod: str) -> bool:
        """Whether a pod takes turns here."""
        return pod in self._account

    # --- turns ---

    async def acquire(self, user: SlotUser, stage: Stage, still_hoped_for: "Hope") -> str:
        """A pod of a stage whose turn it is, once there is one. The pods that were awake on its slots sleep by then.

        Args:
            still_hoped_for: asked about once a second.

        Raises:
            InstanceLostError: there is nothing to wait for.
        """
        number = next(self._numbers)
        priority = self._users[user.job].share.priority if user.job in self._users else 0
        self._waiting[number] = _Waiting(user, stage, WaitingTask(number, user.job, (), priority, STAGES.index(stage)))
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
        """Something has changed: tasks that wait look again."""
        self._turns = None
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _decided(self) -> Turns:
        """Whose turn it is now. Pods in the way are asked to sleep, once."""
        turns = self._turns
        if turns is None:
            waiting = [replace(each.task, instances=self._able(each)) for each in self._waiting.values()]
            turns = self._turns = take_turns(waiting, self._use())
            for pod in turns.sleeps:
                self._owners[pod].put_to_sleep(pod)
            self._note_shortages([self._waiting[number] for number in turns.lacking])
        return turns

    def _note_shortages(self, lacking: Sequence[_Waiting]) -> None:
        """Tasks wait for their pods' slots while others are free: after as long as a start takes, one more starts."""
        now = time.monotonic()
        counts = Counter((each.user.job, each.stage) for each in lacking)
        for job, member in self._users.items():
            for stage in STAGES:
                start_seconds = member.user.could_start(stage) if counts[job, stage] else None
                shortage = member.shortages.setdefault(stage, Shortage(now))
                waited = shortage.observe(0 if start_seconds is None else counts[job, stage], now)
                if start_seconds is not None and waited >= start_seconds:
                    shortage.started()
                    member.user.start(stage)

    def _able(self, waiting: _Waiting) -> list[str]:
        pods = [*waiting.user.free(waiting.stage), *waiting.user.asleep(waiting.stage)]
        return [pod for pod in pods if pod in self._account]

    def _use(self) -> SlotUse:
        users = [member.user for member in self._users.values()]
        idle = {pod for user in users for pod in user.idle()}
        leaving = {pod for user in users for pod in user.leaving()}
        held = dict.fromkeys(self._users, 0)
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
            used={job: member.use.charge(held[job], now) for job, member in self._users.items()},
        )

    def _pass(self, number: int, priority: int) -> None:
        """A task's turn has come: those of its priority that came before it were passed."""
        for each in self._waiting.values():
            if each.task.number < number and each.task.priority == priority:
                each.task = replace(each.task, passed=each.task.passed + 1)

    # --- claims ---

    def _want(self) -> None:
        wanted = sum(-(-member.share.gpus // self._together) for member in self._users.values())
        self._division.want(self._namespace, wanted)

    async def _make_claims(self) -> None:
        review = await self._division.review(self._namespace)
        for member in list(self._users.values()):
            member.user.reviewed(review)

    async def _give_back(self) -> None:
        await asyncio.sleep(_KEPT_SECONDS)
        self._giving_back = None
        try:
            await self._division.give_back(self._namespace)
        except ApiError as error:
            _logger.warning("slots of %s stay without pods: %s", self._namespace, self._explained(error))

    async def _look_after(self) -> None:
        """Make claims again that somebody has deleted, for as long as there are jobs."""
        while True:
            await asyncio.sleep(_REVIEW_SECONDS)
            try:
                await self._make_claims()
                self._make_room()
            except UnavailableError as error:
                _logger.warning("slots of %s: %s", self._namespace, self._explained(error))
            except ApiError as error:
                for member in list(self._users.values()):
                    member.user.trouble(self._explained(error))

    def _make_room(self) -> None:
        """End a pod without a task where another one, whose task waits, lacks memory on the node."""
        waiting = {(each.user.job, each.stage) for each in self._waiting.values()}
        members = list(self._users.values())
        pods = [replace(pod, priority=member.share.priority) for member in members for pod in member.user.node_mates()]
        now = time.monotonic()
        if any(pod.state == "ending" for pod in pods):
            self._made_room = now
        if now < self._made_room + _SCHEDULING_SECONDS:
            return
        chosen = pod_to_end(pods, waiting)
        if chosen is not None:
            self._made_room = now
            _logger.warning("%s has no task, and ends: a pod whose task waits lacks memory on its node", chosen)
            self._owners[chosen].end(chosen)

    def _explained(self, error: ApiError) -> str:
        match error:
            case NotFoundError():
                return (
                    f"pool {self._name} has deviceClass {self._device_class}, and the cluster has no ResourceClaims of"
                    " resource.k8s.io/v1; upgrade to Kubernetes 1.34 or newer, or install the chart without deviceClass"
                )
            case InvalidError():
                return f"pool {self._name}: the API server refuses its ResourceClaims: {error.message}"
            case _:
                return f"the slots of pool {self._name} in namespace {self._namespace}: {error}"


class Hope(Protocol):
    """Says whether a task should wait on for a pod."""

    def __call__(self) -> str | None:
        """None to wait on; else why not."""
