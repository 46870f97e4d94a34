"""The events of a learner, and what they say of its step."""

import asyncio
import math
import time

from rlhfless_functions.api import Event, LearnResult, Learnt, Published, Started, Waiting
from rlhfless_operator.platforms.base import InstanceState, StateChange
from rlhfless_operator.training.journal.step_journal import StepJournal


class LearnerListener:
    """Hears the events of a learner.

    Args:
        journal: its ledger is told when the learner waits.
    """

    def __init__(self, journal: StepJournal) -> None:
        self.works = False
        """Whether an instance works on the request, and waits for nothing."""
        self.heard = asyncio.Event()
        """Set once it has reported anything."""
        self.waits_after: int | None = None
        """Number of pieces that it has finished, while it waits for more."""
        self.learnt = asyncio.Event()
        """Set once the step is learnt, or the request has ended."""
        self.learned: LearnResult | None = None
        """Result of the step, while the learner publishes it."""
        self.published = asyncio.Event()
        """Set once the step before is published, or the request has ended."""
        self.metrics: dict[str, float] | None = None
        """Metrics of publishing the step before."""
        self._counts: dict[str, float] = {}
        self._ledger = journal.ledger
        self._instance = ""
        self.place: list[str] = []
        """Place of the learner; see `Started.place`."""
        self._worked, self._since = 0.0, math.inf
        """Seconds of work until it waited last, and the time since which it works."""

    @property
    def worked_seconds(self) -> float:
        """Seconds for which the learner has worked on the step, the load of its state included."""
        return self._worked + max(0.0, time.monotonic() - self._since)

    def begins(self, counts: dict[str, float]) -> None:
        """Begin an attempt.

        Args:
            counts: metrics of its step.
        """
        self.learnt.clear()
        self.works, self.learned, self._counts = False, None, counts
        self._worked, self._since = self.worked_seconds, math.inf

    def lost(self) -> None:
        """Note that the learner is lost, and its work."""
        self.works, self._worked, self._since = False, 0.0, math.inf

    def over(self) -> None:
        """Note that the request has ended."""
        for each in (self.heard, self.learnt, self.published):
            each.set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Learnt):
            self.learned = with_more(LearnResult.model_validate(event.result), self._counts)
            self.learnt.set()
        elif isinstance(event, Published):
            self.metrics = event.metrics
            self.published.set()
        elif isinstance(event, Started):
            self._instance, self.place, self.waits_after = event.instance, event.place, None
            self.works, self._since = True, time.monotonic()
        elif isinstance(event, Waiting):
            self.waits_after, self.works = event.pieces if event.waiting else None, not event.waiting
            self._worked = self.worked_seconds
            self._since = math.inf if event.waiting else time.monotonic()
            # A learner that waits holds its GPU idle, and the ledger must show that.
            state: InstanceState = "idle" if event.waiting else "busy"
            self._ledger.observe(StateChange(self._instance, "learning", state, time.monotonic()))
        self.heard.set()


def with_more(learned: LearnResult, metrics: dict[str, float]) -> LearnResult:
    """Return a result with more metrics."""
    return learned.model_copy(update={"metrics": {**learned.metrics, **metrics}})
