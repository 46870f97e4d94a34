"""A version that is published beside the learner's next step, from a copy in the host's memory."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peft import PeftModel

from rlhfless_functions.api import UnpublishedVersion
from rlhfless_functions.learning.outputs import publish_version, published_bytes
from rlhfless_functions.learning.state import TrainingState
from rlhfless_functions.runtime.host_memory import free_host_bytes
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import torch_dtype
from rlhfless_functions.weights.critic import critic_state
from rlhfless_functions.weights.saving import converted, host_copy

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.005
"""Seconds between checks whether a task that waits for a publication is told to stop."""


@dataclass
class HeldVersion:
    """A copy of the tensors that a version publishes. Later steps do not change it. Its state must be of one rank."""

    version: UnpublishedVersion
    model: ModelSettings
    state: TrainingState
    """The models, for their names and settings alone."""
    policy: dict[str, torch.Tensor]
    """Tensors of the policy, or of its adapter, in the host's memory."""
    critic: dict[str, torch.Tensor]
    """Tensors of the critic, in the host's memory; empty if there is none."""

    def publish(self) -> dict[str, float]:
        """Publish the version, and return metrics of its publication. If it has been published before, it stays as it
        is.

        Raises:
            TaskError: `artifact_unwritable`; the version is not published.
        """
        began = time.monotonic()
        publish_version(self.version, self.model, self.state, self.policy, self.critic)
        metrics = published_bytes(self.version, self.model, self.state)
        return {**metrics, "seconds/publish": time.monotonic() - began}


def hold(version: UnpublishedVersion, model: ModelSettings, state: TrainingState) -> HeldVersion:
    """Copy a version to the host's memory."""
    dtype = torch_dtype(model)
    with torch.no_grad():
        if isinstance(state.policy, PeftModel):
            learnt = ((name, each.detach()) for name, each in state.policy.named_parameters() if each.requires_grad)
            policy = {name: host_copy(each, each.dtype) for name, each in learnt}
        else:
            policy = converted(state.policy, dtype, copied=True)
        critic = critic_state(state.critic, dtype, copied=True) if state.critic is not None else {}
    return HeldVersion(version, model, state, policy, critic)


def can_hold(state: TrainingState, model: ModelSettings) -> bool:
    """Return whether the host's memory has room for a copy of a version, and for as much again."""
    size = torch_dtype(model).itemsize
    adapted = isinstance(state.policy, PeftModel)
    numbers = sum(each.numel() for each in state.policy.parameters() if each.requires_grad or not adapted)
    numbers += sum(each.numel() for each in state.critic.parameters()) if state.critic is not None else 0
    if (free := free_host_bytes()) >= 2 * numbers * size:
        return True
    logger.warning("a version of %d bytes is published before the next step: %d bytes are free", numbers * size, free)
    return False


class Publication:
    """Publishes a version in a thread of its own, and lets its copy go.

    Args:
        held: the version.
    """

    def __init__(self, held: HeldVersion) -> None:
        self.version = held.version
        self._held: HeldVersion | None = held
        self._metrics: dict[str, float] | None = None
        self._error: BaseException | None = None
        self._listener: Callable[[dict[str, float]], None] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        # A process that ends without waiting leaves nothing published: the manifest comes last.
        threading.Thread(target=self._publish, name="publication", daemon=True).start()

    def tell(self, listener: Callable[[dict[str, float]], None]) -> None:
        """Have the metrics told once the version is published, before `result` returns them."""
        with self._lock:
            if self._metrics is not None:
                listener(self._metrics)
            else:
                self._listener = listener

    def result(self, check: Callable[[], None]) -> dict[str, float]:
        """Return the metrics, once the version is published; see `wait`.

        Raises:
            TaskError: the version can't be published.
        """
        self.wait(check)
        self.heed()
        assert self._metrics is not None
        return self._metrics

    def heed(self) -> None:
        """Raise the error if publishing has failed by now."""
        if self._error is not None:
            raise self._error

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until it has ended, well or not.

        Args:
            check: called while this waits; it raises an error to stop waiting.
        """
        while not self._ended.wait(LOOK_SECONDS):
            check()

    def _publish(self) -> None:
        assert self._held is not None
        try:
            metrics = self._held.publish()
        except BaseException as error:
            logger.warning("%s could not be published: %s", self.version.weights, error)
            self._error = error
        else:
            with self._lock:
                self._metrics = metrics
                if self._listener is not None:
                    self._listener(metrics)
        finally:
            self._held = None
            self._ended.set()
