"""Where functions run. A platform holds instances and carries one task to one of them; it knows nothing of training."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from rlhfless_functions.api import Event, Failed, RunRequest, Stage, WeightsReference
from rlhfless_functions.settings import EngineSettings, ModelSettings

InstanceState = Literal["starting", "idle", "busy", "switching", "asleep", "draining", "ended"]
"""What an instance does. `switching`: it is put to sleep, or wakes, and has its GPUs without working. `asleep`: it is
kept without GPUs. `draining`: it was told to end, and has its GPUs until it is gone."""


@dataclass(frozen=True)
class StateChange:
    """An instance entered a state; the ledger is made of these."""

    instance: str
    stage: Stage
    state: InstanceState
    at: float
    """Monotonic seconds."""


@dataclass(frozen=True)
class Preload:
    """What an instance loads before it is ready, so that its first request finds the model there."""

    model: ModelSettings
    weights: WeightsReference
    engine: EngineSettings | None = None
    """What generates, for an instance of generation."""


class InstanceLostError(Exception):
    """The stream ended without a terminal record: a killed pod, a broken connection, silence. The work can go on
    elsewhere, from what the instance has published."""


class InstanceSilentError(InstanceLostError):
    """Nothing was heard for too long. The instance may be there still, and hang."""


class TaskFailedError(Exception):
    """The function said that it can't do the task."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.reason = failed.reason
        self.retryable = failed.retryable


class PlatformUnavailableError(Exception):
    """What the functions need can't be had now, such as a Service, a permission or a setting of the cluster. The
    message names it with the remedy; trying again later may help."""


class Platform(Protocol):
    """Where functions run."""

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """Want `count` instances of a stage from now on. Missing ones are started, and nobody waits for them;
        surplus ones are released as they become idle, once the stage's keep-alive has passed."""

    def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """Carry a task to a free instance of its stage and yield what it says, the `Done` record last.

        Closing the generator cuts the task, and returns when the instance has published what it had.

        Raises:
            InstanceLostError: the stream ended without a terminal record.
            TaskFailedError: the stream ended with a `failed` record, or the request was refused.
        """

    async def close(self) -> None:
        """End every instance. Nothing is left behind."""


StateListener = Callable[[StateChange], None]
