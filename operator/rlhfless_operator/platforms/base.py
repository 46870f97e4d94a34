"""The interface of platforms. A platform runs instances and sends tasks to them; it knows nothing about training."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from rlhfless_functions.api import Event, Failed, LearnRequest, Preload, RunRequest, Stage
from rlhfless_operator.job.charged import Charged

InstanceState = Literal["starting", "idle", "busy", "switching", "asleep", "draining", "ended"]
"""State of an instance. `switching`: it falls asleep or wakes, and holds its GPUs without working. `asleep`: it is kept
without GPUs. `draining`: it was told to end, and holds its GPUs until it is gone."""


@dataclass(frozen=True)
class StateChange:
    """An instance entered a state. The ledger consists of these records."""

    instance: str
    stage: Charged
    state: InstanceState
    at: float
    """Monotonic seconds."""


class InstanceLostError(Exception):
    """The stream ended without a terminal record: a killed pod, a broken connection, silence. Another instance can
    continue the work from what this one has published."""


class InstanceSilentError(InstanceLostError):
    """The instance was silent for too long. It may still exist, and hang."""


class TaskFailedError(Exception):
    """The function reported that it can't do the task."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.reason = failed.reason
        self.retryable = failed.retryable


class PlatformUnavailableError(Exception):
    """Something that the functions need is missing now, such as a Service, a permission or a setting of the cluster.
    The message names it with the remedy; a later retry may succeed."""


def takes_spare_slots(request: RunRequest) -> bool:
    """Return whether a task takes only slots that no other task wants, because its batch is not finished."""
    return isinstance(request, LearnRequest) and request.following is not None and not request.waits


class Platform(Protocol):
    """A place where functions run."""

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """Set the wanted number of instances of a stage. Missing ones start in the background. Surplus ones are
        released once they have been idle for the stage's keep-alive."""

    def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """Send a task to a free instance of its stage and yield its events, the `Done` record last.

        Closing the generator cuts the task, and returns when the instance has published its partial results.

        Raises:
            InstanceLostError: the stream ended without a terminal record.
            TaskFailedError: the stream ended with a `failed` record, or the request was refused.
        """

    async def close(self) -> None:
        """End every instance, and clean up."""


StateListener = Callable[[StateChange], None]
