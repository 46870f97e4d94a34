"""One job's pods on the slots of its namespace: they wake, sleep, and take tasks in their turn."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import aiohttp

from rlhfless_functions.api import Event, RunRequest, Stage
from rlhfless_operator.job.charged import Function
from rlhfless_operator.planner.pools.host_memory import NodeMate, NodeMateState
from rlhfless_operator.platforms.base import TaskFailedError
from rlhfless_operator.platforms.pods.dispatch import Queue
from rlhfless_operator.platforms.pods.manifests import PORT
from rlhfless_operator.platforms.pods.pod_watch import PodView
from rlhfless_operator.platforms.pods.stage_pods import StagePods
from rlhfless_operator.platforms.stream import run_task, shows_work
from rlhfless_operator.platforms.turns.slot_claims import why_overlooked
from rlhfless_operator.platforms.turns.slot_division import ClaimsReview
from rlhfless_operator.platforms.turns.slot_pool import SlotPool

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_SLEEP_SECONDS = 120.0
"""Time limit for a pod to release its memory, in seconds."""
_ASK_SECONDS = 2.0


class TurnTaking:
    """The pods of one job that take turns. Requests go to pods directly, as Knative would choose any pod of a stage.

    Args:
        pool: the slots of its namespace.
        job: unique id of the job.
        books: books of the stages whose pods take turns.
        session: session for requests to pods; the caller closes it.
        token: the job's token.
        remove: deletes a pod that does not answer.
        problem: returns the problem of a stage's pods; empty if none is known.
        on_problem: called when a problem of slots changes, with `STAGE: text` or `slots: text`; the text is empty when
            the problem is over.
    """

    def __init__(
        self,
        pool: SlotPool,
        job: str,
        books: Mapping[Function, StagePods],
        *,
        session: aiohttp.ClientSession,
        token: str,
        start_timeout: float,
        remove: Callable[[Function, str], Coroutine[Any, Any, None]],
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
        """Pods about which the scheduler had reported nothing at the last review."""
        self._ending: set[str] = set()
        self._evicted: set[str] = set()
        """Pods that end to free memory for others; they get no more tasks."""
        self._processes: dict[str, str | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what the platform calls ---

    def takes_turns(self, stage: Stage) -> bool:
        """Return whether the pods of a stage take turns."""
        return stage in self._books

    async def acquire(self, stage: Stage, *, spare: bool = False) -> str:
        """Wait for a pod to get its turn for a task, and return the pod.

        Args:
            spare: whether the task takes only slots that no other task wants.

        Raises:
            InstanceLostError: no pod will take it.
        """
        book, queue, without_pods = self._books[stage], Queue(sent=time.monotonic()), time.monotonic()

        def hope() -> str | None:
            nonlocal without_pods
            now = time.monotonic()
            if book.usable:
                without_pods = now
            reason = self._problem(stage) or "its pods report no problem"
            if now > without_pods + self._start_timeout:
                return f"no {stage} pod was ready within {self._start_timeout:g} s: {reason}"
            if queue.look(now, idle_seconds=0.0, hopeless=book.hopeless()) == "give up":
                return f"the {stage} pods don't start: {reason}"
            return None

        return await self._pool.acquire(self, stage, hope, spare=spare)

    async def send(self, pod: str, request: RunRequest, stall_seconds: float) -> AsyncGenerator[Event, None]:
        """Send a task to a pod whose turn it is.

        Raises:
            InstanceLostError, TaskFailedError: raised by `run_task`.
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
                # It may still publish an earlier task's results.
                if error.reason != "busy" or time.monotonic() > until:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    def pod_changed(self, view: PodView, *, first: bool) -> None:
        """Handle a change of a pod, which its book has recorded already.

        Args:
            first: whether it existed before this driver, and so may be awake.
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
            # Its process has ended, which has released its slots.
            self._books[view.stage].starts_anew(view.name)
            self._pool.gone(view.name)
            known = False
        if not known and view.ready:
            self._welcome(view, first)

    def pod_gone(self, view: PodView) -> None:
        """Handle a pod that is gone."""
        self._ending.discard(view.name)
        self._evicted.discard(view.name)
        self._processes.pop(view.name, None)
        self._pool.gone(view.name)

    def left(self) -> None:
        """Handle a pod that no longer has a task."""
        self._pool.notify()
        self._evict()

    def close(self) -> None:
        """Leave the pool. Terminating pods still release their slots."""
        self._pool.leave(self)

    # --- what the pool calls ---

    def free(self, stage: Function) -> Sequence[str]:
        """Return the pods of a stage that are awake and have no task."""
        return self._staying(self._books[stage].free())

    def asleep(self, stage: Function) -> Sequence[str]:
        """Return the pods of a stage that sleep and could take a task."""
        return [name for name in self._staying(self._books[stage].asleep()) if self._pool.knows(name)]

    def idle(self) -> Sequence[str]:
        """Return the pods of any stage that are awake and have no task."""
        return [name for book in self._books.values() for name in self._staying(book.free())]

    def leaving(self) -> Sequence[str]:
        """Return the pods of any stage that are releasing their slots."""
        return [*self._evicted, *(name for book in self._books.values() for name in book.leaving())]

    def take(self, pod: str) -> None:
        """Assign a task to a pod."""
        self._book_of(pod).taken(pod)

    def put_to_sleep(self, pod: str) -> None:
        """Put a pod to sleep, because another pod needs its slots."""
        book = self._book_of(pod)
        book.falls_asleep(pod)
        self._spawn(self._sleep(book, pod))

    def could_start(self, stage: Stage) -> float | None:
        """Return the seconds that one more pod of a stage takes to start.

        None if the stage may have no more, as with a learner, whose state is in its only pod, or if one is starting.
        """
        book = self._books[stage]
        if stage == "learning" or book.most is None or book.starting or book.there < book.wanted:
            return None
        return book.start_seconds if book.wanted < book.most else None

    def start(self, stage: Stage) -> None:
        """Start one more pod of a stage."""
        book = self._books[stage]
        book.wanted += 1
        book.on_change()

    def reviewed(self, claims: ClaimsReview) -> None:
        """Handle a review of the claims.

        Pods of claims that take no new pods are deleted. Pods that the scheduler has ignored since the previous review
        are reported.
        """
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
        """Return all pods, as the other pods on their nodes see them."""
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
        """End a pod without a task, to free its node's memory for another one. A new one starts when needed."""
        self._evicted.add(pod)
        book = self._book_of(pod)
        book.wanted = max(0, book.wanted - 1)
        book.on_change()
        self._spawn(self._remove(book.stage, pod))

    def trouble(self, problem: str) -> None:
        """Report a problem of the slots; an empty text ends it."""
        if problem != self._reported:
            self._reported = problem
            self._on_problem(f"slots: {problem}")

    # --- the rest ---

    def _book_of(self, pod: str) -> StagePods:
        return next(book for book in self._books.values() if pod in book.names)

    def _staying(self, pods: Sequence[str]) -> list[str]:
        return [name for name in pods if name not in self._evicted]

    def _welcome(self, view: PodView, first: bool) -> None:
        book = self._books[view.stage]
        if not view.slots:
            problem = f"{view.name} has no slots: the API server did not call the operator's webhook for it"
            _logger.error("%s", problem)
            self._on_problem(f"{view.stage}: {problem}")
            self._spawn(self._remove(view.stage, view.name))
            return
        self._pool.arrived(self, view.name, view.slots, asleep=not first)
        if first:
            book.falls_asleep(view.name)
            self._spawn(self._sleep(book, view.name))

    async def _sleep(self, book: StagePods, pod: str) -> None:
        """Make a pod release its slots' memory, or end it if it can't."""
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
                    async with self._session.post(
                        f"{_url(view)}/v1/sleep", headers=headers, allow_redirects=False
                    ) as response:
                        if response.status != 409:
                            return response.status == 200
                    await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _see_off(self, view: PodView) -> None:
        """Release the slots of a terminating pod when its process has ended, long before the pod is gone."""
        book = self._books[view.stage]
        # The platform may be closed before the pod has ended, and its session with it.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_SECONDS)) as session:
            while self._pool.knows(view.name) and not book.is_asleep(view.name):
                if view.ip is None or not await _answers(session, view):
                    break
                await asyncio.sleep(_POLL_SECONDS)
        self._pool.gone(view.name)

    def _evict(self) -> None:
        """Delete idle pods that keep a claim from being created again."""
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
    """Return whether a pod's process answers."""
    try:
        async with session.get(f"{_url(view)}/healthz", allow_redirects=False):
            return True
    except aiohttp.ClientConnectorError:
        return False
    except (TimeoutError, aiohttp.ClientError, OSError):
        return True


def _url(view: PodView) -> str:
    host = f"[{view.ip}]" if view.ip and ":" in view.ip else view.ip
    return f"http://{host}:{PORT}"
