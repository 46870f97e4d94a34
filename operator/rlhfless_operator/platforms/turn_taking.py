"""One job's pods on the slots of its namespace: which are awake, which are put to sleep, and where a task is sent."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import aiohttp

from rlhfless_functions.api import Event, RunRequest, Stage
from rlhfless_operator.planner.host_memory import NodeMate, NodeMateState
from rlhfless_operator.platforms.base import TaskFailedError
from rlhfless_operator.platforms.dispatch import Queue
from rlhfless_operator.platforms.manifests import PORT
from rlhfless_operator.platforms.pod_watch import PodView
from rlhfless_operator.platforms.slot_claims import why_overlooked
from rlhfless_operator.platforms.slot_division import ClaimsReview
from rlhfless_operator.platforms.slot_pool import SlotPool
from rlhfless_operator.platforms.stage_pods import StagePods
from rlhfless_operator.platforms.stream import run_task, shows_work

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_SLEEP_SECONDS = 120.0
"""Longest time for a pod to give its memory back."""
_ASK_SECONDS = 2.0


class TurnTaking:
    """The pods of one job that take turns. Requests go to a pod itself, since Knative would choose any of its stage.

    Args:
        pool: the slots of its namespace.
        job: unique id of the job.
        books: of the stages whose pods take turns.
        session: for requests to pods; its maker closes it.
        token: the job's own.
        remove: deletes a pod that does not answer.
        problem: what is wrong with a stage's pods; empty if nothing is known.
        on_problem: told what keeps pods from their slots, whenever that has changed, after a stage's name or `slots`
            and a colon; without a text after it when nothing does any more.
    """

    def __init__(
        self,
        pool: SlotPool,
        job: str,
        books: Mapping[Stage, StagePods],
        *,
        session: aiohttp.ClientSession,
        token: str,
        start_timeout: float,
        remove: Callable[[Stage, str], Coroutine[Any, Any, None]],
        problem: Callable[[Stage], str],
        on_problem: Callable[[str], None],
    ) -> None:
        self.job = job
        self._pool = pool
        self._books = books
        self._session = session
        self._token = token
        self._start_timeout = start_timeout
        self._remove = remove
        self._problem = problem
        self._on_problem = on_problem
        self._condemned: frozenset[str] = frozenset()
        self._reported = ""
        self._overlooked: set[str] = set()
        """Pods of which the scheduler had said nothing at the last look."""
        self._ending: set[str] = set()
        self._evicted: set[str] = set()
        """Pods that make room for others: they get no task any more."""
        self._processes: dict[str, str | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what the platform calls ---

    def takes_turns(self, stage: Stage) -> bool:
        """Whether the pods of a stage do."""
        return stage in self._books

    async def acquire(self, stage: Stage) -> str:
        """The pod that a task goes to, once its turn has come.

        Raises:
            InstanceLostError: no pod will take it.
        """
        book, queue, without_pods = self._books[stage], Queue(sent=time.monotonic()), time.monotonic()

        def hope() -> str | None:
            nonlocal without_pods
            now = time.monotonic()
            if book.usable:
                without_pods = now
            reason = self._problem(stage) or "its pods show nothing wrong"
            if now > without_pods + self._start_timeout:
                return f"no {stage} pod was ready within {self._start_timeout:g} s: {reason}"
            if queue.look(now, idle_seconds=0.0, hopeless=book.hopeless()) == "give up":
                return f"the {stage} pods don't start: {reason}"
            return None

        return await self._pool.acquire(self, stage, hope)

    async def send(self, pod: str, request: RunRequest, stall_seconds: float) -> AsyncGenerator[Event, None]:
        """Carry a task to a pod whose turn it is.

        Raises:
            InstanceLostError, TaskFailedError: as `run_task` does.
        """
        book = self._books[request.key.stage]
        view = book.view(pod)
        assert view is not None, "a pod without an address has no turn"
        until = time.monotonic() + stall_seconds
        while True:
            try:
                async with contextlib.aclosing(
                    run_task(self._session, _url(view), self._token, request, stall_seconds=stall_seconds)
                ) as events:
                    async for event in events:
                        if shows_work(event):
                            book.works(pod)
                        yield event
                return
            except TaskFailedError as error:
                # It may still publish what an earlier task left.
                if error.reason != "busy" or time.monotonic() > until:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    def pod_changed(self, view: PodView, *, first: bool) -> None:
        """The watch tells of a pod; its book knows already.

        Args:
            first: whether it was there before this driver: it may be awake.
        """
        if view.stage not in self._books or view.ended:
            return
        known, before = self._pool.knows(view.name), self._processes.get(view.name)
        self._processes[view.name] = view.process
        if view.deleting:
            if known and view.name not in self._ending:
                self._ending.add(view.name)
                self._spawn(self._see_off(view))
            return
        if known and before is not None and view.process != before:
            # Its process has ended, and with it what it had on the slots.
            self._books[view.stage].starts_anew(view.name)
            self._pool.gone(view.name)
            known = False
        if not known and view.ready:
            self._welcome(view, first)

    def pod_gone(self, view: PodView) -> None:
        """A pod is no more."""
        self._ending.discard(view.name)
        self._evicted.discard(view.name)
        self._processes.pop(view.name, None)
        self._pool.gone(view.name)

    def left(self) -> None:
        """A pod has no task any more."""
        self._pool.notify()
        self._evict()

    def close(self) -> None:
        """Leave the pool. Pods that end still give their slots back."""
        self._pool.leave(self)

    # --- what the pool calls ---

    def free(self, stage: Stage) -> Sequence[str]:
        """Pods of a stage that are awake and have no task."""
        return self._staying(self._books[stage].free())

    def asleep(self, stage: Stage) -> Sequence[str]:
        """Pods of a stage that sleep and could take a task."""
        return [name for name in self._staying(self._books[stage].asleep()) if self._pool.knows(name)]

    def idle(self) -> Sequence[str]:
        """Pods of any stage that are awake and have no task."""
        return [name for book in self._books.values() for name in self._staying(book.free())]

    def leaving(self) -> Sequence[str]:
        """Pods of any stage that give their slots back already."""
        return [*self._evicted, *(name for book in self._books.values() for name in book.leaving())]

    def take(self, pod: str) -> None:
        """A task comes to a pod."""
        book = next(book for book in self._books.values() if pod in book.names)
        book.taken(pod)

    def put_to_sleep(self, pod: str) -> None:
        """Another pod needs its slots."""
        book = next(book for book in self._books.values() if pod in book.names)
        book.falls_asleep(pod)
        self._spawn(self._sleep(book, pod))

    def could_start(self, stage: Stage) -> float | None:
        """Seconds that one more pod of a stage takes to start; None where it may have no more, or one is on its way. A
        learner's state is in its one pod."""
        book = self._books[stage]
        if stage == "learning" or book.most is None or book.starting or book.there < book.wanted:
            return None
        return book.start_seconds if book.wanted < book.most else None

    def start(self, stage: Stage) -> None:
        """Have one more pod of a stage."""
        book = self._books[stage]
        book.wanted += 1
        book.on_change()

    def reviewed(self, claims: ClaimsReview) -> None:
        """The claims were looked at: pods of those that take no new ones have to go, and pods that wait without a word
        of the scheduler's since the look before are told of."""
        self._condemned = claims.condemned
        self.trouble(claims.problem)
        overlooked = set()
        for book in self._books.values():
            for name in book.names:
                view = book.view(name)
                if view is not None and view.overlooked:
                    overlooked.add(name)
                    if name in self._overlooked:
                        book.suspect(name, why_overlooked(view.claims, claims.there, claims.ending))
        self._overlooked = overlooked
        self._evict()

    def node_mates(self) -> Sequence[NodeMate]:
        """All pods, as far as it matters to those on the same nodes."""
        found = []
        for stage, book in self._books.items():
            resting = {*self.free(stage), *self.asleep(stage)}
            for name in book.names:
                view = book.view(name)
                if view is None:
                    continue
                state: NodeMateState = "other"
                if view.deleting or name in self._evicted:
                    state = "ending"
                elif view.lacks_memory:
                    state = "lacks memory"
                elif name in resting:
                    state = "resting"
                found.append(NodeMate(name, self.job, stage, frozenset(view.claims), state, book.resting_since(name)))
        return found

    def end(self, pod: str) -> None:
        """A pod without a task makes room for another one in its node's memory. It starts anew when it is needed."""
        self._evicted.add(pod)
        book = next(book for book in self._books.values() if pod in book.names)
        book.wanted = max(0, book.wanted - 1)
        book.on_change()
        self._spawn(self._remove(book.stage, pod))

    def trouble(self, problem: str) -> None:
        """What keeps slots from being there; empty when nothing does any more."""
        if problem != self._reported:
            self._reported = problem
            self._on_problem(f"slots: {problem}")

    # --- the rest ---

    def _staying(self, pods: Sequence[str]) -> list[str]:
        return [name for name in pods if name not in self._evicted]

    def _welcome(self, view: PodView, first: bool) -> None:
        book = self._books[view.stage]
        if not view.slots:
            problem = f"{view.name} has no slots: the operator's webhook was not asked about it"
            _logger.error("%s", problem)
            self._on_problem(f"{view.stage}: {problem}")
            self._spawn(self._remove(view.stage, view.name))
            return
        self._pool.arrived(self, view.name, view.slots, asleep=not first)
        if first:
            book.falls_asleep(view.name)
            self._spawn(self._sleep(book, view.name))

    async def _sleep(self, book: StagePods, pod: str) -> None:
        """Have a pod give its slots' memory back, or end it where it can't."""
        if await self._asked_to_sleep(book, pod):
            book.sleeps(pod)
            self._pool.slept(pod)
        elif pod in book.names:
            await self._remove(book.stage, pod)
        self._evict()

    async def _asked_to_sleep(self, book: StagePods, pod: str) -> bool:
        headers = {"Authorization": f"Bearer {self._token}"}
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_SLEEP_SECONDS):
                while (view := book.view(pod)) is not None and not view.deleting:
                    async with self._session.post(f"{_url(view)}/v1/sleep", headers=headers) as response:
                        if response.status != 409:
                            return response.status == 200
                    await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _see_off(self, view: PodView) -> None:
        """A pod on its way out gives its slots back when its process has ended, long before the pod is gone."""
        book = self._books[view.stage]
        # The platform may be closed before the pod has ended, and its session with it.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_SECONDS)) as session:
            while self._pool.knows(view.name) and not book.is_asleep(view.name):
                if view.ip is None or not await _answers(session, view):
                    break
                await asyncio.sleep(_POLL_SECONDS)
        self._pool.gone(view.name)

    def _evict(self) -> None:
        """Delete pods without work that keep a claim from being made anew."""
        for stage, book in self._books.items():
            for name in (*book.free(), *book.asleep()):
                view = book.view(name)
                if view is not None and self._condemned & set(view.slots):
                    self._spawn(self._remove(stage, name))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answers(session: aiohttp.ClientSession, view: PodView) -> bool:
    """Whether a pod's process is there."""
    try:
        async with session.get(f"{_url(view)}/healthz"):
            return True
    except aiohttp.ClientConnectorError:
        return False
    except (TimeoutError, aiohttp.ClientError, OSError):
        return True


def _url(view: PodView) -> str:
    host = f"[{view.ip}]" if view.ip and ":" in view.ip else view.ip
    return f"http://{host}:{PORT}"
