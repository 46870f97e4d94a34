"""The stored parts of a step's samples, by sink: a request that resumes samples reads them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless_functions.api import AddSamples, Partial, Samples, SampleTask
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.training.actors.heard import key_of


@dataclass(frozen=True)
class Places:
    """The places where a request finds the stored tokens of its samples."""

    resume_from: list[str]
    """Sinks, then the newest announced part with unfinished samples of each."""
    known_until: dict[str, str]
    """Newest announced part of each sink."""


class SinkIndex:
    """The sinks of one step, by the samples that they hold.

    Args:
        before: sinks of earlier drivers of the step. Any of them may hold any sample.
    """

    def __init__(self, before: Sequence[str]) -> None:
        self._before = list(before)
        self._sinks_of: dict[Key, list[str]] = defaultdict(list)
        self._announced: dict[str, str] = {}
        self._partials: dict[str, str] = {}
        self._published: dict[Key, int] = {}

    def places(self, keys: Sequence[Key]) -> Places:
        """Return the places where a new request for these samples looks."""
        earlier = dict.fromkeys(sink for key in keys for sink in self._sinks_of[key])
        partials = [self._partials[sink] for sink in earlier if sink in self._partials]
        known = {sink: self._announced[sink] for sink in earlier if sink in self._announced}
        return Places([*self._before, *earlier, *partials], known)

    def opened(self, sink: str, keys: Sequence[Key]) -> None:
        """Note that a request for these samples writes to a new sink."""
        for key in keys:
            self._sinks_of[key].append(sink)

    def add(self, sink: str, samples: Sequence[SampleTask]) -> AddSamples:
        """Return the line that adds samples to the share of a sink, and note that it writes them there."""
        keys = [key_of(sample) for sample in samples]
        places = self.places(keys)
        self.opened(sink, keys)
        return AddSamples(
            sink=sink,
            samples=list(samples),
            resume_from=[place for place in places.resume_from if place != sink],
            known_until={place: part for place, part in places.known_until.items() if place != sink},
        )

    def finished(self, sink: str, event: Samples) -> None:
        """Note that a part with finished samples is in a sink."""
        self._announced[sink] = event.part

    def flushed(self, sink: str, event: Partial) -> None:
        """Note that a part with unfinished samples is in a sink. It holds all that earlier sinks have of them."""
        self._announced[sink] = self._partials[sink] = event.part
        for sample in event.samples:
            key = (sample.prompt, sample.index)
            self._published[key] = sample.tokens
            self._sinks_of[key] = [sink]

    def published_tokens(self, key: Key) -> int:
        """Return the number of stored response tokens of an unfinished sample."""
        return self._published.get(key, 0)
