"""The delivery of a request to a pod: it is sent again until a pod takes it, or until no pod can.

Knative sends requests to a pod whose stream has ended, even while the pod still publishes. Activators restart, and a
request may queue at an activator that has no pod for it. None of this counts as a loss. Pure functions of the time
classify the end of an attempt and decide whether another one follows.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from rlhfless_functions.api import Event, Stage
from rlhfless_operator.platforms.base import InstanceLostError, InstanceSilentError, TaskFailedError
from rlhfless_operator.platforms.pods.stage_pods import StagePods

_REROUTE_SECONDS = 15.0
"""Seconds after which a request that no pod has taken is sent again, if a pod was idle for as long."""
_HOPELESS_SECONDS = 30.0
"""Seconds for which all pods of a stage may fail to start before the work counts as lost."""
_TROUBLE_SECONDS = 60.0
"""Seconds for which requests may be refused, as while an activator restarts, before the work counts as lost."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_LOOK_SECONDS = 1.0

Attempt = Callable[[float], AsyncGenerator[Event, None]]
"""Sends the request and yields its events, the first within the given seconds."""


class PodsFailError(InstanceLostError):
    """All pods of a stage fail to start."""


async def deliver(
    attempt: Attempt, book: StagePods, problem: Callable[[], str], start_timeout: float
) -> AsyncGenerator[Event, None]:
    """Yield the events of the first attempt that a pod takes.

    Args:
        book: the stage's pods.
        problem: returns the known problem of the pods; empty if there is none.
        start_timeout: seconds within which a pod must take the request.

    Raises:
        InstanceLostError: no pod takes the request, or the pod that took it is lost.
        TaskFailedError: the task failed.
    """
    attempts = Attempts(book.stage, start_timeout, begun=time.monotonic())
    while True:
        async with aclosing(attempt(attempts.left(time.monotonic()))) as events:
            try:
                first = await _first_event(events, book)
            except (TaskFailedError, InstanceLostError) as error:
                attempts.ended(error, time.monotonic(), problem())
            else:
                if first is not None:
                    yield first
                    async for event in events:
                        yield event
                    return
                attempts.rerouted()
        await asyncio.sleep(attempts.pause())


async def _first_event(events: AsyncGenerator[Event, None], book: StagePods) -> Event | None:
    """Return the first event of an attempt; None if the request should be sent again.

    Raises:
        InstanceLostError, TaskFailedError: the stream raised it.
        PodsFailError: no pod will take it.
    """
    queue = Queue(sent=time.monotonic())
    waiting: asyncio.Task[Event] = asyncio.ensure_future(anext(events))
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=_LOOK_SECONDS)
            if waiting.done():
                break
            now = time.monotonic()
            match queue.look(now, idle_seconds=book.idle_for(now), hopeless=book.hopeless()):
                case "reroute":
                    return None
                case "give up":
                    raise PodsFailError(f"the {book.stage} pods don't start: {book.problem()}")
        return waiting.result()
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@dataclass
class Queue:
    """An attempt that waits for a pod."""

    sent: float
    """Monotonic seconds, like all times in this module."""
    _hopeless_since: float | None = None

    def look(self, now: float, *, idle_seconds: float, hopeless: bool) -> Literal["wait", "reroute", "give up"]:
        """Decide what to do.

        Args:
            idle_seconds: seconds for which a pod of the stage has been idle; 0 if none is.
            hopeless: whether there are pods and waiting fixes none of them.
        """
        if now > self.sent + _REROUTE_SECONDS and idle_seconds > _REROUTE_SECONDS:
            return "reroute"
        self._hopeless_since = (self._hopeless_since or now) if hopeless else None
        if self._hopeless_since is not None and now > self._hopeless_since + _HOPELESS_SECONDS:
            return "give up"
        return "wait"


Ending = Literal["occupied", "refused", "unanswered", "final"]
"""End of an attempt that no pod took.

`occupied`: it reached a pod that still publishes after a cut, or that is about to end. `refused`: it reached no pod,
as while an activator restarts. `unanswered`: there was no answer within the time limit. `final`: to send it again would
not help.
"""


def ending_of(error: TaskFailedError | InstanceLostError) -> Ending:
    """Classify the error of an attempt that ended before its first event."""
    if isinstance(error, TaskFailedError):
        return "occupied" if error.reason in ("busy", "drained") else "final"
    if isinstance(error, PodsFailError):
        return "final"
    return "unanswered" if isinstance(error, InstanceSilentError) else "refused"


@dataclass
class Attempts:
    """The attempts of one request until a pod has taken it."""

    stage: Stage
    start_timeout: float
    """Seconds within which a pod must take it."""
    begun: float
    """Monotonic seconds, like all times in this module."""
    _refused_since: float | None = None
    _next_pause: float = _FIRST_PAUSE_SECONDS

    def left(self, now: float) -> float:
        """Return the seconds that the next attempt may wait for its first event."""
        return max(self.begun + self.start_timeout - now, 0.001)

    def pause(self) -> float:
        """Return the seconds until the next attempt."""
        pause = self._next_pause
        self._next_pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return pause

    def rerouted(self) -> None:
        """Record that an attempt was cancelled, because a new one may reach a pod sooner."""
        self._refused_since = None

    def ended(self, error: TaskFailedError | InstanceLostError, now: float, problem: str) -> None:
        """Record that an attempt ended before its first event.

        Args:
            problem: the known problem of the stage's pods; empty if there is none.

        Raises:
            InstanceLostError, TaskFailedError: the request is not sent again.
        """
        match ending_of(error):
            case "final":
                raise error
            case "unanswered":
                reason = problem or "its pods report no problem"
                message = f"no {self.stage} pod took the work within {self.start_timeout:g} s: {reason}"
                raise InstanceLostError(message) from error
            case "occupied":
                self._refused_since = None
            case "refused":
                self._refused_since = self._refused_since or now
                if now > self._refused_since + _TROUBLE_SECONDS:
                    raise InstanceLostError(f"{error}; {problem}" if problem else str(error)) from error
