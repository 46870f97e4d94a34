"""A request's way to a pod: it is sent again until one takes it, or nothing is left to hope for.

Knative takes a pod for free whose stream has ended, though it still publishes, and sends requests to it; activators
restart; and with several of them a request may queue at one that has no pod to give. None of this is a loss. What an
attempt came to, and whether another one follows, is decided by pure functions that are told the time.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from rlhfless_functions.api import Event, Stage
from rlhfless_operator.platforms.base import InstanceLostError, InstanceSilentError, TaskFailedError
from rlhfless_operator.platforms.stage_pods import StagePods

_REROUTE_SECONDS = 15.0
"""A request that no pod has taken for this long, while a pod has been idle for as long, is sent anew."""
_HOPELESS_SECONDS = 30.0
"""How long all pods of a stage may fail to start before the work counts as lost."""
_TROUBLE_SECONDS = 60.0
"""How long requests may be refused on their way, as while an activator restarts, before the work counts as lost."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_LOOK_SECONDS = 1.0

Attempt = Callable[[float], AsyncGenerator[Event, None]]
"""Sends the request; its events, the first within the given seconds."""


class PodsFailError(InstanceLostError):
    """All pods of a stage fail to start."""


async def deliver(
    attempt: Attempt, book: StagePods, problem: Callable[[], str], start_timeout: float
) -> AsyncGenerator[Event, None]:
    """The events of the first attempt that a pod takes.

    Args:
        book: of the stage's pods.
        problem: what is known to be wrong with them; empty if nothing is.
        start_timeout: seconds within which a pod has to take the request.

    Raises:
        InstanceLostError: no pod takes it, or the one that did is lost.
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
    """The first event of an attempt; None if the request should be sent anew.

    Raises:
        InstanceLostError, TaskFailedError: from the stream.
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
    """One attempt that waits for a pod to take it."""

    sent: float
    """Monotonic seconds, like all times here."""
    _hopeless_since: float | None = None

    def look(self, now: float, *, idle_seconds: float, hopeless: bool) -> Literal["wait", "reroute", "give up"]:
        """What to do.

        Args:
            idle_seconds: for how long a pod of the stage has been idle; 0 if none is.
            hopeless: whether there are pods, and waiting mends none of them.
        """
        if now > self.sent + _REROUTE_SECONDS and idle_seconds > _REROUTE_SECONDS:
            return "reroute"
        self._hopeless_since = (self._hopeless_since or now) if hopeless else None
        if self._hopeless_since is not None and now > self._hopeless_since + _HOPELESS_SECONDS:
            return "give up"
        return "wait"


Ending = Literal["occupied", "refused", "unanswered", "final"]
"""How an attempt that no pod took has ended.

`occupied`: it came to a pod that still publishes what a cut left, or that is about to go. `refused`: it came to no pod,
as while an activator restarts. `unanswered`: nobody has said anything in all the time that there was. `final`: to send
it again would mend nothing.
"""


def ending_of(error: TaskFailedError | InstanceLostError) -> Ending:
    """What the error of an attempt means that has ended before its first event."""
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
    """Seconds within which a pod has to take it."""
    begun: float
    """Monotonic seconds, like all times here."""
    _refused_since: float | None = None
    _next_pause: float = _FIRST_PAUSE_SECONDS

    def left(self, now: float) -> float:
        """Seconds that the next attempt may wait for its first event."""
        return max(self.begun + self.start_timeout - now, 0.001)

    def pause(self) -> float:
        """Seconds until the next attempt."""
        pause = self._next_pause
        self._next_pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return pause

    def rerouted(self) -> None:
        """An attempt was broken off, because another way may be shorter."""
        self._refused_since = None

    def ended(self, error: TaskFailedError | InstanceLostError, now: float, problem: str) -> None:
        """An attempt has ended before its first event.

        Args:
            problem: what is known to be wrong with the stage's pods; empty if nothing is.

        Raises:
            InstanceLostError, TaskFailedError: the request is not sent again.
        """
        match ending_of(error):
            case "final":
                raise error
            case "unanswered":
                reason = problem or "its pods show nothing wrong"
                message = f"no {self.stage} pod took the work within {self.start_timeout:g} s: {reason}"
                raise InstanceLostError(message) from error
            case "occupied":
                self._refused_since = None
            case "refused":
                self._refused_since = self._refused_since or now
                if now > self._refused_since + _TROUBLE_SECONDS:
                    raise InstanceLostError(f"{error}; {problem}" if problem else str(error)) from error
