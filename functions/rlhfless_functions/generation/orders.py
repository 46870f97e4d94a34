"""The lines of a request in their order, and what each needs: it is read, or opened, beside the decoding."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rlhfless_functions.api import AddSamples, Event, GenerationRequest, Join, Line
from rlhfless_functions.environments.episodes import Episodes
from rlhfless_functions.generation.reading import Read, read_share

_THREADS = 4

OpenEpisodes = Callable[[GenerationRequest], Episodes | None]
"""Opens the environments of a share; None if a response is a single turn."""


@dataclass(frozen=True)
class Order:
    """A line, with what is read from the store for it."""

    line: Line
    reading: Future[Read] | None = None


class Orders:
    """The lines that have come and are not carried out.

    Args:
        emit_of: returns what sends the events of a sink.
        open_episodes: opens the environments of a share; called in any thread.
    """

    def __init__(self, emit_of: Callable[[str], Callable[[Event], None]], open_episodes: OpenEpisodes) -> None:
        self._emit_of = emit_of
        self._open_episodes = open_episodes
        self._orders: deque[Order] = deque()
        self._requests: dict[str, GenerationRequest] = {}
        self._episodes: dict[str, Future[Episodes | None]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shares")

    def __len__(self) -> int:
        return len(self._orders)

    @property
    def first(self) -> Order:
        """The line that came first."""
        return self._orders[0]

    def take(self) -> Order:
        """Take the line that came first out."""
        return self._orders.popleft()

    def put(self, line: Line, version: int) -> None:
        """Begin to read what a line names.

        Args:
            version: of the batch that its samples join.
        """
        reading: Future[Read] | None = None
        if isinstance(line, Join):
            sink = line.request.sink
            self._requests[sink] = line.request
            self._episodes[sink] = self._pool.submit(self._open_episodes, line.request)
            reading = self._pool.submit(read_share, line.request, self._emit_of(sink), version)
        elif isinstance(line, AddSamples) and (request := self._requests.get(line.sink)) is not None:
            update = {"samples": line.samples, "resume_from": line.resume_from, "known_until": line.known_until}
            more = request.model_copy(update=update)
            reading = self._pool.submit(read_share, more, self._emit_of(line.sink), version, own_sink=False)
        self._orders.append(Order(line, reading))

    def request_of(self, sink: str) -> GenerationRequest:
        """Return the request of a share."""
        return self._requests[sink]

    def episodes_of(self, sink: str) -> Episodes | None:
        """Return the environments of a share, once they are open.

        Raises:
            TaskError: they can't be opened.
        """
        return self._episodes[sink].result()

    def close_episodes(self, sink: str) -> None:
        """End the environments of a share, beside the decoding."""
        opening = self._episodes.pop(sink)

        def close() -> None:
            if opening.exception() is None and (episodes := opening.result()) is not None:
                episodes.close()

        self._pool.submit(close)

    def beside(self, work: Callable[[], None]) -> None:
        """Do something beside the decoding."""
        self._pool.submit(work)

    def close(self) -> None:
        """End all environments, and wait for the work beside the decoding."""
        for sink in list(self._episodes):
            self.close_episodes(sink)
        self._pool.shutdown(wait=True)
