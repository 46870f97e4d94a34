"""The pods in which samples act: the state of each for the ledger, and their least number."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhfless_functions.api import Failed
from rlhfless_operator.job.charged import Function
from rlhfless_operator.knative import ApiError, ResourceClient, Revision
from rlhfless_operator.platforms.base import InstanceState, StateChange, StateListener
from rlhfless_operator.platforms.pods.manifests import MIN_SCALE
from rlhfless_operator.platforms.pods.pod_watch import PodView

_PAUSE_SECONDS = 1.0
_log = logging.getLogger(__name__)


class EnvironmentPods:
    """The book of the pods of an environment's servers, or of a shelter.

    While tasks act in it, no pod may be removed: Knative would pick any, and end its sessions. So their least number
    grows with them, and is 0 once no task needs them. Nothing tells which of them work, so all that are ready count as
    busy.

    Args:
        revisions: client of Revisions.
        namespace: namespace of the job.
        on_state: called with every change of a pod's state.
        on_problem: called when the problem of the pods changes, with `environment: text` or `shelter: text`; the text
            is empty when it is over.
        most: the most pods that are kept.
        function: whose pods they are.
    """

    def __init__(
        self,
        revisions: ResourceClient[Revision],
        namespace: str,
        on_state: StateListener,
        on_problem: Callable[[str], None],
        most: int,
        function: Function = "environment",
    ) -> None:
        self._revisions = revisions
        self._namespace = namespace
        self._on_state = on_state
        self._on_problem = on_problem
        self._most = most
        self._function = function
        self._pods: dict[str, tuple[InstanceState, PodView]] = {}
        self._users = 0
        self._changed = asyncio.Event()
        self._revision: str | None = None
        self._problem = ""

    @property
    def names(self) -> list[str]:
        """All pods, including terminating ones."""
        return list(self._pods)

    @property
    def problem(self) -> str:
        """The problem of the pods; empty if none is known."""
        return self._problem

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep all pods while a task acts in the environment."""
        self._users += 1
        self._changed.set()
        try:
            yield
        finally:
            self._users -= 1
            self._changed.set()

    async def run(self, revision: str) -> None:
        """Control the least number of pods until cancelled.

        Args:
            revision: name of the Revision.
        """
        self._revision = revision
        applied: int | None = None
        while True:
            # Pods of an older Revision go by themselves, and must not be replaced.
            kept = sum(state != "draining" and view.revision == revision for state, view in self._pods.values())
            # A pod that is removed meanwhile must not lower it.
            least = max(min(kept, self._most), applied or 0) if self._users else 0
            if least != applied:
                try:
                    await self._bound(revision, least)
                    applied = least
                except ApiError as error:
                    _log.warning("the pods of %s can't be kept: %s", revision, error)
                    await asyncio.sleep(_PAUSE_SECONDS)
                continue
            await self._changed.wait()
            self._changed.clear()

    async def release(self) -> None:
        """Keep no pods any more, once `run` has ended."""
        if self._revision is not None:
            await self._bound(self._revision, 0)

    def changed(self, view: PodView) -> None:
        """Record a pod that is new or has changed."""
        if view.ended:
            self.gone(view)
            return
        state: InstanceState = "draining" if view.deleting else "busy" if view.ready else "starting"
        before = self._pods.get(view.name)
        self._pods[view.name] = (state, view)
        if before is None or before[0] != state:
            self._tell(view.name, state)
        self._report()

    def gone(self, view: PodView) -> None:
        """Remove a pod that is gone."""
        if self._pods.pop(view.name, None) is not None:
            self._tell(view.name, "ended")
            self._report()

    def explained(self, failed: Failed) -> Failed:
        """Return a task's failure, with the problem of the pods where that may be the reason."""
        if failed.reason != "environment_failed" or not self._problem:
            return failed
        return failed.model_copy(update={"message": f"{failed.message}; its pods: {self._problem}"})

    def forget(self) -> None:
        """Stop keeping the book, because another driver does from now on."""
        for name in self.names:
            self._tell(name, "ended")
        self._pods.clear()

    async def _bound(self, revision: str, least: int) -> None:
        patch = {"metadata": {"annotations": {MIN_SCALE: str(least)}}}
        await self._revisions.patch(self._namespace, revision, patch)

    def _tell(self, name: str, state: InstanceState) -> None:
        self._on_state(StateChange(name, "environment", state, time.monotonic()))
        self._changed.set()

    def _report(self) -> None:
        problems = {name: view.problem for name, (_, view) in self._pods.items() if view.problem}
        problem = "; ".join(f"{name}: {text}" for name, text in problems.items())
        if problem != self._problem:
            self._on_problem(f"{self._function}: {problem}")
        self._problem = problem
