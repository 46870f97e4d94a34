"""Fetches the next version of the weights into host memory while the engine decodes.

It is a cache. A request waits only for a version that is just being fetched. If its weights are not ready, it loads
them as usual. A fault is logged once a version and has no other effect.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.api import NextWeights, WeightsReference

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""Seconds between checks for the next version on a file system of this machine."""
STORE_LOOK_SECONDS = 1.0
"""Seconds between checks in an object store, which charges for each."""

Fetch = Callable[[NextWeights], Any]
"""Reads a version into host memory, and returns the input of the engine's `load`."""


class WeightsPrefetcher:
    """Watches for the next versions in a thread of its own while a request decodes. It holds at most one version."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watch: _Watch | None = None
        self._fetching: tuple[WeightsReference, _Watch] | None = None
        self._ready: tuple[WeightsReference, Any] | None = None
        self.settled: int | None = None
        """Newest version for which a request need not be held back: it is in host memory, or could not be put there. At
        first it is the version with which the running request decodes. None while nothing is watched for."""
        self._present = -1

    def watch(self, present: int, upcoming: Sequence[NextWeights], fetch: Fetch) -> None:
        """Look for newer versions from now on, and fetch the newest one.

        Args:
            present: version in the engine.
            upcoming: versions in the order in which they will appear.
            fetch: called in the thread.
        """
        self.pause()
        with self._changed:
            self._present = present
            ready = self._ready[0] if self._ready is not None else None
            if ready is not None and ready.version <= present:
                self._ready = ready = None
            self.settled = max(present, ready.version if ready is not None else 0) if upcoming else None
            left = [each for each in upcoming if self.settled is not None and each.weights.version > self.settled]
            if left:
                self._watch = _Watch(left, fetch)
                threading.Thread(target=self._run, args=(self._watch,), name="prefetch", daemon=True).start()

    def pause(self) -> None:
        """Stop watching. A fetch under way goes on to its end."""
        with self._changed:
            self.settled = None
            if self._watch is not None:
                self._watch.ended.set()

    def stop(self) -> None:
        """Stop watching, and forget the version that is ready or being fetched."""
        self.pause()
        with self._changed:
            if self._fetching is not None:
                # It may be the fetch of an earlier request.
                self._fetching[1].forgotten = True
            self._watch = self._ready = None
            self._changed.notify_all()

    def take(self, weights: WeightsReference) -> Any | None:
        """Return the result of this version's fetch, once; None if there is none. Wait while it is being fetched."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_awaited(weights))
            if self._ready is None or self._ready[0] != weights:
                return None
            _, prefetched = self._ready
            self._ready = None
            return prefetched

    def _is_awaited(self, weights: WeightsReference) -> bool:
        return self._fetching is not None and self._fetching[0] == weights and not self._fetching[1].forgotten

    def _run(self, watch: "_Watch") -> None:
        left = watch.upcoming
        while left and not watch.ended.is_set():
            began = time.monotonic()
            found = self._published(left, watch)
            if found:
                newest, left = left[found - 1], left[found:]
                self._fetch(newest, watch)
            else:
                pace = STORE_LOOK_SECONDS if artifacts.local_path(_folder(left[0])) is None else LOOK_SECONDS
                watch.ended.wait(max(0.0, began + pace - time.monotonic()))

    def _published(self, upcoming: Sequence[NextWeights], watch: "_Watch") -> int:
        """Return the number of versions that are published."""
        try:
            found = 0
            while found < len(upcoming) and _is_published(upcoming[found]):
                found += 1
        except artifacts.ArtifactError as error:
            if not watch.has_warned:
                watch.has_warned = True
                logger.warning("it can't be seen whether new weights are there, and they are loaded later: %s", error)
        return found

    def _fetch(self, upcoming: NextWeights, watch: "_Watch") -> None:
        weights, began = upcoming.weights, time.monotonic()
        with self._changed:
            # A fetch of an earlier request may not have ended.
            self._changed.wait_for(lambda: self._fetching is None)
            if watch.ended.is_set():
                return
            if self._ready is not None and self._ready[0] == weights:
                self.settled = weights.version
                return
            self._fetching = weights, watch
            # There is memory for one version.
            self._ready = None
        prefetched = None
        try:
            prefetched = watch.fetch(upcoming)
        except Exception as error:
            logger.warning("weights version %s could not be fetched ahead: %s", weights.version, error)
        fields = {"version": weights.version, "seconds": round(time.monotonic() - began, 4)}
        with self._changed:
            if prefetched is not None and not watch.forgotten and weights.version > self._present:
                self._ready = weights, prefetched
                logger.info("weights fetched ahead", extra={"fields": fields})
            if self._watch is watch and not watch.ended.is_set():
                self.settled = weights.version
            self._fetching = None
            self._changed.notify_all()


@dataclass(eq=False)
class _Watch:
    """The watch of one request."""

    upcoming: Sequence[NextWeights]
    fetch: Fetch
    ended: threading.Event = field(default_factory=threading.Event)
    forgotten: bool = False
    """Whether the result of a fetch is not needed any more."""
    has_warned: bool = False


def _folder(upcoming: NextWeights) -> str:
    return upcoming.weights.adapter or upcoming.weights.uri


def _is_published(upcoming: NextWeights) -> bool:
    """Return whether the manifest can be read. This is one GET: asking an object store for a missing file would also
    list.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
    """
    try:
        artifacts.read_bytes(artifacts.join(_folder(upcoming), artifacts.MANIFEST))
    except artifacts.ArtifactMissingError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return True
