"""One task from the view of a stage's code: a request, a way to send events, and a signal to stop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlhfless_functions.api import Awake, Event, FailureReason
from rlhfless_functions.runtime.inbox import Inbox

StopReason = Literal["cut", "drain"]


class TaskError(Exception):
    """The task can't be done. It becomes the stream's `failed` record.

    Args:
        reason: one of the contract's failure reasons.
        message: what is wrong, where, and the remedy.
        retryable: whether another instance may succeed.
    """

    def __init__(self, reason: FailureReason, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable


@dataclass
class TaskContext:
    """The task's connection to its caller. Stage code runs in one worker thread; the server reads from another."""

    emit: Callable[[Event], None]
    """Send an event; thread-safe, never blocks, and does nothing once the caller is gone."""
    asleep: bool = False
    """Whether the instance released its device's memory before this task, and has not taken it again."""
    address: str | None = None
    """URL at which other instances of the job reach this one."""
    token: str = ""
    """The job's, for requests to other instances."""
    inbox: Inbox | None = None
    """The lines that follow a live request; None for any other."""
    _reason: StopReason | None = None

    def awake(self) -> None:
        """If the instance slept, report once that it has its device's memory again and begins to work."""
        if self.asleep:
            self.asleep = False
            self.emit(Awake())

    def stop(self, reason: StopReason) -> None:
        """Ask the task to publish its partial results and return; called by the server."""
        self._reason = self._reason or reason

    @property
    def stop_reason(self) -> StopReason | None:
        """None while the task should go on."""
        return self._reason
