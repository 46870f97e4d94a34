"""A batch in pieces of whole groups, in canonical order: whole already, or as preparation publishes it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic, sleep

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, PrepareResult, SampleTask
from rlhfless_functions.data.rollouts import PreparedSample, read_prepared
from rlhfless_functions.runtime.store_errors import store_errors

LOOK_SECONDS = 0.25
"""Between two looks for chunks that have been published."""

Key = tuple[int, int]
"""(prompt, index) of a sample."""


def cut(samples: Sequence[SampleTask], pieces: int) -> list[list[Key]]:
    """The samples of each piece: about as many groups in each, none of them cut; fewer pieces where there are too few.

    It depends on the arguments alone, so that whoever learns from the batch, and whenever, cuts it alike.
    """
    groups: dict[int, list[Key]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append((sample.prompt, sample.index))
    ordered = list(groups.values())
    bounds = [len(ordered) * number // pieces for number in range(pieces + 1)]
    runs = [ordered[start:end] for start, end in pairwise(bounds) if end > start]
    return [[key for group in run for key in group] for run in runs]


@dataclass
class FollowedBatch:
    """A batch that is still being prepared, for one reader.

    Args:
        reference: its samples; its parts are those that were there at first.
        following: how the URIs of the results of the chunks that are to come begin.
        check: called while there is nothing to read; raises to break off.
        on_waiting: told when the reader has to wait, and when it need not any longer.
    """

    reference: BatchReference
    following: str
    check: Callable[[], None]
    on_waiting: Callable[[bool], None] = lambda waiting: None
    waited_seconds: float = 0.0
    """How long there was nothing to do so far."""
    _begun: bool = False
    _read: set[str] = field(default_factory=set)

    def pieces(self, number: int) -> Iterator[list[PreparedSample]]:
        """Each piece, once all of it has been published.

        Raises:
            ArtifactError: if what is published cannot be read.
        """
        found: dict[Key, PreparedSample] = {}
        for piece in cut(self.reference.samples, number):
            waiting = False
            while any(key not in found for key in piece):
                with store_errors():
                    fresh = self._fresh()
                    found |= read_prepared(fresh)
                if not fresh:
                    if not waiting:
                        self.on_waiting(True)
                    waiting = True
                    self._wait()
            if waiting:
                self.on_waiting(False)
            yield [found.pop(key) for key in piece]

    def _fresh(self) -> list[str]:
        """Parts that have not been read yet."""
        if not self._begun and self.reference.parts:
            self._begun = True
            return self.reference.parts
        folder = self.following.rsplit("/", 1)[0]
        results = [uri for uri in artifacts.list_files(folder) if uri.startswith(self.following)]
        fresh = [uri for uri in results if uri.endswith(".json") and uri not in self._read]
        self._read.update(fresh)
        return [PrepareResult.model_validate(artifacts.read_json(uri)).part for uri in fresh]

    def _wait(self) -> None:
        began = monotonic()
        self.check()
        sleep(LOOK_SECONDS)
        self.waited_seconds += monotonic() - began


def whole_in_pieces(samples: Sequence[PreparedSample], number: int) -> Iterator[list[PreparedSample]]:
    """The same pieces of a batch that is there, in canonical order."""
    by_key = {sample.key: sample for sample in samples}
    tasks = [SampleTask(prompt=sample.prompt, index=sample.index) for sample in samples]
    for piece in cut(tasks, number):
        yield [by_key[key] for key in piece]
