"""The samples of one rollout that live actors generate. No I/O but the queue of its complete groups."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from rlhfless_functions.api import AddSamples, Event, GenerationRequest, Partial, Samples, SampleTask, WeightsReference
from rlhfless_functions.artifacts import join
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.actors.generated import CompleteGroup, Completion, GenerationOutcome
from rlhfless_operator.training.actors.heard import key_of
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.actors.sinks import SinkIndex


@dataclass(frozen=True)
class LiveSettings:
    """Settings of one rollout on live actors."""

    step: int
    """Number of the rollout."""
    sink_root: str
    """Folder of its sinks."""
    driver: int
    """Number of this driver; no two drivers write the same sink."""
    retries: int
    """Losses in a row, without a sample finished in between, that it survives."""
    weights: SamplingWeights
    """Weights that sample it."""
    make_request: Callable[[ActorAttempt], GenerationRequest]
    """The request of a share."""
    on_event: Callable[[Event], None]
    """Called with every event of its shares."""


class LiveRollout:
    """One rollout.

    Args:
        groups: its samples, whole groups in the order in which they begin.
        outcome: filled in along the way.
        settings: of the rollout.
        grows: whether groups will be added, until it `is_whole`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[SampleTask]],
        outcome: GenerationOutcome,
        settings: LiveSettings,
        *,
        grows: bool = False,
    ) -> None:
        self.settings = settings
        self.outcome = outcome
        self.waiting = deque(list(group) for group in groups)
        """Groups, or what is left of them, that no actor has."""
        self.complete: asyncio.Queue[CompleteGroup | None] = asyncio.Queue()
        """Groups whose last sample is published. None follows the last one, or an error."""
        self.error: Exception | None = None
        self.failures = 0
        """Losses in a row without a finished sample in between."""
        self._left = {key_of(sample) for group in groups for sample in group}
        self._completion = Completion(groups, outcome, self.complete.put_nowait)
        self._sinks = SinkIndex(outcome.before)
        self._grows = grows

    @property
    def weights(self) -> WeightsReference:
        """Weights that its next tokens are sampled with."""
        return self.settings.weights.now

    @property
    def is_over(self) -> bool:
        """Whether it needs no actor any more."""
        return self.error is not None or not (self._left or self._grows)

    def add(self, groups: Sequence[Sequence[SampleTask]]) -> None:
        """Add further groups, which begin after the others."""
        self.waiting.extend(list(group) for group in groups)
        self._left |= {key_of(sample) for group in groups for sample in group}
        self._completion.expect(groups)

    def is_whole(self) -> None:
        """Note that no group will be added any more."""
        self._grows = False
        if self.error is None and self.is_over:
            self.complete.put_nowait(None)

    def open_share(
        self, actor: str, weights: WeightsReference, samples: Sequence[SampleTask]
    ) -> tuple[str, GenerationRequest]:
        """Return the sink and the request of a new share of an actor."""
        settings = self.settings
        number = len(self.outcome.sinks)
        sink = join(settings.sink_root, f"{actor}-{settings.driver}-{number:04d}")
        keys = [key_of(sample) for sample in samples]
        places = self._sinks.places(keys)
        self.outcome.sinks.append(sink)
        self._sinks.opened(sink, keys)
        attempt = ActorAttempt(actor, number, weights, list(samples), sink, places.resume_from, places.known_until)
        return sink, settings.make_request(attempt)

    def more(self, sink: str, samples: Sequence[SampleTask]) -> AddSamples:
        """Return the line that adds samples to a share."""
        return self._sinks.add(sink, samples)

    def take(self, sink: str, event: Event) -> list[Key]:
        """Take in an event of a share; return the samples that have finished."""
        self.settings.on_event(event)
        if isinstance(event, Partial):
            self._sinks.flushed(sink, event)
        if not isinstance(event, Samples):
            return []
        if event.part.startswith(sink):
            self._sinks.finished(sink, event)
        finished = self._completion.take(event)
        self._left.difference_update(finished)
        self.failures = 0
        if self.is_over:
            self.complete.put_nowait(None)
        # Samples that an earlier request had finished are announced again.
        return [(each.prompt, each.index) for each in event.samples]

    def give_back(self, samples: Sequence[SampleTask], *, apart: bool = False) -> None:
        """Let samples wait again, before all others, that an actor has not finished.

        Args:
            apart: whether each may go to another actor.
        """
        groups: dict[Hashable, list[SampleTask]] = {}
        for sample in samples:
            if key_of(sample) in self._left:
                groups.setdefault(key_of(sample) if apart else sample.prompt, []).append(sample)
        self.waiting.extendleft(reversed(list(groups.values())))

    def fail(self, error: Exception) -> None:
        """End the rollout with an error."""
        if not self.is_over:
            self.error = error
            self.waiting.clear()
            self.complete.put_nowait(None)
