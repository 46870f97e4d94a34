"""Learning instances that take a step together. They are started and cut as a whole, and are fewer if some are
missing."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhfless_functions.api import Done, Event, Heartbeat, RunRequest, Started
from rlhfless_operator.job.instance_ranges import LearnerRange
from rlhfless_operator.platforms.base import InstanceLostError, InstanceSilentError, Platform, TaskFailedError

_LAST_WORDS_SECONDS = 5.0
"""Seconds in which the other members may still report once one has ended: they tell why, or they are done as well."""

AttemptError = InstanceLostError | TaskFailedError


class GangIncompleteError(Exception):
    """Not all instances of a gang were there in time; those that were have been cut.

    Args:
        there: number of instances that were there.
    """

    def __init__(self, there: int) -> None:
        super().__init__(f"{there} came")
        self.there = there


class GangBrokenError(Exception):
    """An attempt of a gang has failed; all of its instances have been cut.

    Args:
        error: the failure that tells most.
        lost: number of instances that are gone.
    """

    def __init__(self, error: AttemptError, lost: int) -> None:
        super().__init__(str(error))
        self.error = error
        self.lost = lost


@dataclass
class GangSize:
    """The number of instances for the next attempt of a step.

    It falls when some are lost or don't come. After a checkpoint it is the chosen number again, because a larger gang
    then has no steps to repeat. After each absence it waits for twice as many checkpoints before it asks for the
    missing instances again: those that are there hold their GPUs while they wait.
    """

    allowed: LearnerRange
    now: int = field(init=False)
    chosen: int = field(init=False)
    """Number that the plan wants; the most until it has chosen."""
    memory_error: str = ""
    """Error of the largest gang that had too little memory. No gang that small is tried again."""
    _absences: int = 0
    """Number of times in a row that some did not come."""
    _checkpoints: int = 0
    """Number of checkpoints until it is the chosen number again."""

    def __post_init__(self) -> None:
        self.now = self.chosen = self.allowed.max

    def choose(self, count: int) -> None:
        """Want so many, within the allowed range. The number does not rise before missing instances are asked for
        again."""
        self.chosen = max(self.allowed.min, min(self.allowed.max, count))
        self.now = min(self.now, self.chosen) if self._checkpoints else self.chosen

    def exceed(self, count: int, error: str) -> bool:
        """Note that so many have too little memory, as `error` says: want more, and never so few again. Return whether
        more are allowed."""
        if count >= self.allowed.max:
            return False
        self.memory_error = error
        self.allowed = LearnerRange(min=max(self.allowed.min, count + 1), max=self.allowed.max)
        self.now = self.chosen = max(self.chosen, min(2 * count, self.allowed.max))
        return True

    def fall_to(self, count: int) -> bool:
        """Continue with so many, or with the fewest that are allowed. Return whether so few are allowed."""
        self.now = max(self.allowed.min, min(self.now, count))
        self._checkpoints = max(1, self._checkpoints)
        return self.now <= count

    def miss(self, there: int) -> bool:
        """Continue with the instances that are there, because some did not come. Return whether so few are allowed."""
        self._checkpoints = 2**self._absences
        self._absences += 1
        return self.fall_to(there)

    def absence(self, there: int, count: int) -> str:
        """Return the message for the user if too few of `count` have come to continue."""
        told = f"{there} of {count} learning instances came within learning.gangTimeout, and"
        if self.memory_error:
            fewest = self.allowed.min
            return f"{told} fewer than {fewest} have too little memory ({self.memory_error}); or make room for {fewest}"
        return f"{told} learning.instances.min is {self.allowed.min}; lower it, or make room for more"

    def met(self, count: int) -> None:
        """Note that so many have taken a step."""
        if count >= self.chosen:
            self._absences = 0

    def recover(self) -> None:
        """Note that a checkpoint was written."""
        self._checkpoints = max(0, self._checkpoints - 1)
        if not self._checkpoints:
            self.now = self.chosen


class _Standstill:
    """Notices that nothing works in any instance of a gang. One that waits for the others stands still for no fault.

    Args:
        size: number of instances.
        most: longest seconds.
    """

    def __init__(self, size: int, most: float) -> None:
        self._still = [0.0] * size
        self._most = most
        self.happened = asyncio.Event()

    def heard(self, member: int, event: Event) -> None:
        self._still[member] = event.still_seconds if isinstance(event, Heartbeat) else 0.0
        if min(self._still) >= self._most:
            self.happened.set()

    def error(self) -> InstanceSilentError:
        return InstanceSilentError(
            f"nothing has worked in any of {len(self._still)} learning instances for {min(self._still):.0f} s"
        )


async def run_together(
    platform: Platform,
    requests: Sequence[RunRequest],
    *,
    within: float,
    stall: float,
    listener: Callable[[], Callable[[Event], None]],
) -> dict[str, Any]:
    """Run a task that several instances do together, and return its result, which is the same from each of them.

    Args:
        requests: one for each instance.
        within: seconds from the first instance's start to the last one's.
        stall: longest seconds in which none of the instances works.
        listener: makes the callback for the events of one instance.

    Raises:
        GangIncompleteError: some have not started in time.
        GangBrokenError: an instance failed or was lost, or none works.
    """
    still = _Standstill(len(requests), stall)
    started = [asyncio.Event() for _ in requests]
    streams = [
        asyncio.create_task(_follow(platform, request, begun, partial(still.heard, member), listener()))
        for member, (request, begun) in enumerate(zip(requests, started, strict=True))
    ]
    standing = asyncio.create_task(still.happened.wait())
    assembling = asyncio.create_task(_assemble(started, within))
    try:
        await asyncio.wait([assembling, *streams], return_when=asyncio.FIRST_COMPLETED)
        if assembling.done() and not assembling.result() and not any(stream.done() for stream in streams):
            raise GangIncompleteError(sum(begun.is_set() for begun in started))
        await asyncio.wait([standing, *streams], return_when=asyncio.FIRST_COMPLETED)
        if not any(stream.done() for stream in streams):
            raise GangBrokenError(still.error(), 0)
        await asyncio.wait(streams, timeout=_LAST_WORDS_SECONDS)
        ended = [stream for stream in streams if stream.done()]
        failures: list[AttemptError] = []
        for stream in ended:
            error = stream.exception()
            if error is None:
                return stream.result()
            if not isinstance(error, AttemptError):
                raise error
            failures.append(error)
        raise GangBrokenError(max(failures, key=_telling), sum(map(_is_gone, failures)))
    finally:
        for task in (assembling, standing, *streams):
            task.cancel()
        await asyncio.gather(assembling, standing, *streams, return_exceptions=True)


async def _follow(
    platform: Platform,
    request: RunRequest,
    begun: asyncio.Event,
    heard: Callable[[Event], None],
    on_event: Callable[[Event], None],
) -> dict[str, Any]:
    async with aclosing(platform.run(request)) as events:
        async for event in events:
            if isinstance(event, Started):
                begun.set()
            heard(event)
            on_event(event)
            if isinstance(event, Done):
                return event.result
    raise InstanceLostError("the stream ended without a terminal record")


async def _assemble(started: Sequence[asyncio.Event], within: float) -> bool:
    """Wait for all to start, from the first one's start on; return whether they did in time."""
    waiting = [asyncio.create_task(begun.wait()) for begun in started]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        _, late = await asyncio.wait(waiting, timeout=within)
        return not late
    finally:
        for task in waiting:
            task.cancel()


def _is_gone(error: AttemptError) -> bool:
    return isinstance(error, InstanceLostError) or error.reason == "drained"


def _telling(error: AttemptError) -> tuple[bool, bool, bool]:
    """Rank an error: permanent failures tell most, then losses, and last that another instance is gone."""
    if isinstance(error, InstanceLostError):
        return False, True, False
    return not error.retryable, False, error.reason != "internal"
