"""Publishes versions beside a learner's steps, one at a time."""

from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from rlhfless_functions.api import LearnRequest, Published, UnpublishedVersion
from rlhfless_functions.learning.held_version import Publication, can_hold, hold
from rlhfless_functions.learning.outputs import is_published, publish_version, published_bytes
from rlhfless_functions.learning.state import TrainingState
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import ModelSettings


class VersionPublisher:
    """Has at most one publication under way, of the version of the newest step. It may outlast the step's request."""

    def __init__(self) -> None:
        self._newest: Publication | None = None

    def keep(self, version: UnpublishedVersion | None, check: Callable[[], None]) -> None:
        """Keep the publication if it is of this version. Otherwise wait until it has ended, well or not, and forget it:
        the request that needs its version publishes that anew.

        Args:
            version: a version; None to keep nothing.
            check: called while this waits; it raises an error to stop waiting.
        """
        if self._newest is not None and self._newest.version != version:
            self._newest.wait(check)
            self._newest = None

    def settle(self, check: Callable[[], None]) -> None:
        """Wait, after a step has failed, until the version before is published and reported, or can't be.

        Args:
            check: see `keep`. If it raises a `TaskError`, this waits no longer.
        """
        if self._newest is not None:
            with suppress(TaskError):
                self._newest.wait(check)

    def heed(self) -> None:
        """Raise an error if the publication has failed by now.

        Raises:
            TaskError: it says why.
        """
        if self._newest is not None:
            self._newest.heed()

    def publish_before(
        self, version: UnpublishedVersion, model: ModelSettings, state: TrainingState, context: TaskContext
    ) -> None:
        """Have the version that a step starts from published beside the step, and reported. Every rank calls this.

        Several ranks publish before the step. So does one rank if there is too little memory for a copy.

        Args:
            version: the version; kept by `keep`.
            model: the job's model.
            state: the state at this version.
            context: the step's; it is told.

        Raises:
            TaskError: the version can't be published.
        """
        if self._newest is None:
            if state.ranks.size > 1 or not can_hold(state, model):
                began = monotonic()
                publish_version(version, model, state)
                metrics = published_bytes(version, model, state)
                context.emit(Published(metrics={**metrics, "seconds/publish": monotonic() - began}))
                return
            if is_published(version):
                context.emit(Published(metrics=published_bytes(version, model, state)))
                return
            self.begin(version, model, state)
        assert self._newest is not None
        self._newest.tell(lambda metrics: context.emit(Published(metrics=metrics)))

    def await_earlier(self, check: Callable[[], None]) -> None:
        """Wait until the version before is published, and forget it.

        Args:
            check: see `keep`.

        Raises:
            TaskError: it can't be published.
        """
        if self._newest is not None:
            self._newest.result(check)
            self._newest = None

    def can_publish_beside(self, request: LearnRequest, state: TrainingState) -> bool:
        """Return whether a step may be reported before it is published."""
        alone = state.ranks.size == 1 and request.gang is None
        return request.publish_beside and alone and request.save_checkpoint is None and can_hold(state, request.model)

    def begin(self, version: UnpublishedVersion, model: ModelSettings, state: TrainingState) -> None:
        """Copy a version to the host's memory, and begin to publish the copy. No other may be under way."""
        self._newest = Publication(hold(version, model, state))

    def await_newest(self, check: Callable[[], None]) -> dict[str, float]:
        """Return the metrics of the publication once it has ended.

        Args:
            check: see `keep`.

        Raises:
            TaskError: the version can't be published.
        """
        assert self._newest is not None
        return self._newest.result(check)
