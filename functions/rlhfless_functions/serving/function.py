"""A stage's function and its single worker thread, independent of HTTP."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    BaseRequest,
    ColdStart,
    Done,
    Event,
    Failed,
    Heartbeat,
    Message,
    Preload,
    RunRequest,
    Stage,
    Started,
    WeightsReference,
    dump_event,
    ends_task,
)
from rlhfless_functions.runtime.activity import Activity
from rlhfless_functions.runtime.inbox import Inbox
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import ModelSettings

logger = logging.getLogger(__name__)


class Function(Protocol):
    """The code of one stage, with the caches of one instance."""

    def preload(self, model: ModelSettings, weights: WeightsReference) -> None:
        """Load the model before the first request."""

    def run(self, request: Any, context: TaskContext) -> Message:
        """Do one task."""

    def sleep(self) -> None:
        """Release the device's memory. It is a cache: the next request, or preload, restores it.

        Raises:
            Exception: the memory is not released, and the function can't be used any more.
        """


class Instance:
    """A function and its single worker thread: at most one task at a time, and none after a drain."""

    def __init__(self, stage: Stage, function: Function, *, name: str, started_at: float, token: str = "") -> None:
        self.stage = stage
        self.name = name
        self.token = token
        """The job's token."""
        self.address: str | None = None
        """URL at which other instances of the job reach it, once it listens."""
        self.ready = False
        self.draining = False
        self.lost = False
        """Whether the function reported that it can't continue in this process."""
        self._function = function
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="task")
        self._current: TaskContext | None = None
        self._taken: object | None = None
        """A task that is taken and not begun yet."""
        self._asleep = False
        """Whether the device's memory was released after the last task."""
        self._idle = threading.Event()
        self._idle.set()
        self._listens = asyncio.Event()
        self._started_at = started_at
        self._process_seconds = 0.0
        self._cold_start: ColdStart | None = None
        self.registry = CollectorRegistry()
        self._busy = Gauge("rlhfless_instance_busy", "1 while a task runs", registry=self.registry)
        self._tasks = Counter("rlhfless_tasks", "Tasks by outcome", ["task", "outcome"], registry=self.registry)
        self._seconds = Counter("rlhfless_task_seconds", "Seconds spent in tasks", ["task"], registry=self.registry)
        self._sleeps = Summary(
            "rlhfless_sleep_seconds", "Seconds spent releasing the device's memory", registry=self.registry
        )

    def listening(self) -> None:
        """Record that the server has its socket, which ends the process part of the cold start. The address is set."""
        self._process_seconds = max(0.0, time.time() - self._started_at)
        if self._cold_start is not None:  # There was nothing to load.
            self._cold_start = ColdStart(process=self._process_seconds, load=self._cold_start.load)
        self._listens.set()

    async def start(self, preload: Preload | None) -> None:
        """Load the instance's model in the worker thread, and become ready.

        If that fails, the instance becomes ready anyway: a request that needs the model fails with the same error,
        while a process that ended would restart forever.

        Args:
            preload: the model; None to load nothing.
        """
        if preload is not None and preload.weights_line is not None:
            # Other instances ask at its address for its weights.
            await self._listens.wait()
        loaded_from = time.monotonic()
        if preload is not None:
            loop = asyncio.get_running_loop()
            load: Any = self._function.preload
            if preload.weights_line is not None:
                sources = artifacts.Sources.of_chain((), self.address, self.token, preload.weights_line)
                load = partial(load, sources=sources)
            try:
                await loop.run_in_executor(self._worker, load, preload.model, preload.weights)
            except Exception:
                logger.exception("%s could not be loaded before the first request", preload.weights.uri)
        load_seconds = time.monotonic() - loaded_from
        self._cold_start = ColdStart(process=self._process_seconds, load=load_seconds)
        self.ready = True

    @property
    def busy(self) -> bool:
        """Whether it can take no task: one runs, a cut one still publishes, or the device's memory is being
        released."""
        return not self._idle.is_set()

    def drain(self) -> None:
        """Take no more tasks, and end the running one."""
        self.draining = True
        if self._current is not None:
            self._current.stop("drain")

    async def idle(self) -> None:
        """Wait until no task runs, and the last one has nothing under way."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._idle.wait)
        # Only a learner leaves anything under way.
        if (finish := getattr(self._function, "finish", None)) is not None:
            await loop.run_in_executor(None, finish)

    def take(self) -> object:
        """Take the instance for a task, at once: its stream begins later, and others may ask until then.

        The caller has checked that the instance is not busy.

        Returns:
            A name of the taking, for `give_up`.
        """
        self._idle.clear()
        self._taken = object()
        return self._taken

    def give_up(self, taken: object) -> None:
        """Free the instance if the task's stream never began."""
        if self._taken is taken:
            self._taken = None
            self._ends()

    async def stream(self, request: RunRequest, inbox: Inbox | None = None) -> AsyncIterator[bytes]:
        """Run a task and yield its events. The caller has taken the instance.

        Args:
            inbox: receives the lines that follow the request, if it is live.
        """
        self._taken = None
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        context = TaskContext(emit=emit, asleep=self._asleep, address=self.address, token=self.token, inbox=inbox)
        self._current = context
        self._idle.clear()
        self._busy.set(1)
        started = Started(
            instance=self.name,
            cold_start=self._cold_start,
            engine=getattr(self._function, "engine", None),
            address=self.address,
        )
        working = False
        try:
            # Send it before the work begins, which would hold the interpreter's lock.
            yield dump_event(started)
            self._cold_start = None
            working, self._asleep = True, False
            loop.run_in_executor(self._worker, self._work, request, context)
            activity = Activity()
            while True:
                try:
                    event = await asyncio.wait_for(events.get(), request.heartbeat_seconds)
                    activity.goes_on()
                except TimeoutError:
                    event = Heartbeat(still_seconds=activity.still_seconds())
                yield dump_event(event)
                if ends_task(event):
                    return
        finally:
            context.stop("cut")
            if not working:
                self._ends()

    async def sleep(self) -> float:
        """Release the device's memory in the worker thread. Returns the seconds that it took.

        The caller has checked that the instance is not busy. It is busy until this ends: otherwise a waiting task could
        run with the remains of a failed sleep.

        Raises:
            Exception: raised by the function; the instance is then lost.
        """
        self._idle.clear()
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._sleep)

    def _sleep(self) -> float:
        started = time.monotonic()
        try:
            self._function.sleep()
        except BaseException:
            logger.exception("the device's memory could not be released")
            self.draining = self.lost = True
            raise
        finally:
            self._ends()
        self._asleep = True
        seconds = time.monotonic() - started
        self._sleeps.observe(seconds)
        logger.info("instance sleeps", extra={"fields": {"seconds": round(seconds, 4)}})
        return seconds

    def _ends(self) -> None:
        self._busy.set(0)
        self._current = None
        self._idle.set()

    def _work(self, request: BaseRequest, context: TaskContext) -> None:
        task: str = getattr(request, "task", "unknown")
        fields = {"job": request.key.job_uid, "step": request.key.step, "stage": request.key.stage}
        fields |= {"part": request.key.part, "attempt": request.key.attempt, "task": task}
        started = time.monotonic()
        logger.info("task started", extra={"fields": fields})
        terminal: Done | Failed
        try:
            with store_errors():
                terminal = Done(result=self._result(request, context))
        except TaskError as error:
            terminal = Failed(reason=error.reason, message=str(error), retryable=error.retryable)
        except MemoryError as error:
            terminal = Failed(reason="out_of_memory", message=f"out of memory: {error}", retryable=True)
        except Exception as error:
            logger.exception("task crashed", extra={"fields": fields})
            terminal = Failed(reason="internal", message=f"{type(error).__name__}: {error}", retryable=True)
        outcome = "done" if isinstance(terminal, Done) else terminal.reason
        if outcome == "engine_lost":
            self.draining = self.lost = True
        seconds = time.monotonic() - started
        self._tasks.labels(task, outcome).inc()
        self._seconds.labels(task).inc(seconds)
        self._ends()
        logger.info("task ended", extra={"fields": {**fields, "outcome": outcome, "seconds": round(seconds, 4)}})
        context.emit(terminal)

    def _result(self, request: BaseRequest, context: TaskContext) -> dict[str, Any]:
        if artifacts.exists(request.result):
            return self._stored(request)
        result = self._function.run(request, context).model_dump(mode="json")
        # A driver that was taken for dead may have had the same made. The first result stands.
        if context.stop_reason is None and not artifacts.create_json(request.result, result):
            return self._stored(request)
        return result

    def _stored(self, request: BaseRequest) -> dict[str, Any]:
        stored: dict[str, Any] = artifacts.read_json(request.result)
        return stored
