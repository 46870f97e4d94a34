"""Rollout files: the schedule by which generated samples leave the instance, and the thread that writes them."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Self

from rlhfless_functions import artifacts
from rlhfless_functions.api import Event, FinishedSample, Partial, Samples
from rlhfless_functions.data.rollouts import GeneratedSample, write_rollouts

GROUP_SECONDS = 0.2
"""Least seconds between two parts that are written because a group is complete, while few samples wait."""
GROUP_SHARE = 8
"""Least number of parts of a share. Once a group is complete, an eighth of the share is never held back."""


@dataclass
class FlushSchedule:
    """Decides when to write a part: early enough for preparation to start on whole groups, seldom enough to be cheap.

    Args:
        share: samples that will finish in all.
        flush_seconds: longest time that tokens are kept in the instance alone.
        now: seconds on the caller's clock.
    """

    share: int
    flush_seconds: float
    now: float
    _group_complete: bool = False

    def grown(self, samples: int) -> None:
        """Record that so many more samples will finish."""
        self.share += samples

    def group_completed(self) -> None:
        """Record that all samples of a prompt in this share have finished."""
        self._group_complete = True

    def flushed(self, now: float) -> None:
        """Record that a part has been handed over."""
        self.now = now
        self._group_complete = False

    def due(self, now: float, pending: int) -> Literal["nothing", "finished", "everything"]:
        """Return what to write, with so many finished samples pending: those alone, or the running ones' tokens too."""
        waited = now - self.now
        if waited >= self.flush_seconds:
            return "everything"
        if self._group_complete and (waited >= GROUP_SECONDS or pending * GROUP_SHARE >= self.share):
            return "finished"
        return "nothing"


class RolloutPublisher:
    """Writes rollout parts in a thread of its own while generation continues, and announces each once it is stored.

    Args:
        sink: folder of the attempt.
        parts: parts that are in it already. The numbers of new parts continue theirs.
        emit: sends an event; thread-safe.
    """

    def __init__(self, sink: str, parts: Sequence[str], emit: Callable[[Event], None]) -> None:
        self._sink = sink
        self._emit = emit
        self._next = 1 + max((_number(part) for part in parts), default=-1)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._last: Future[None] | None = None
        self.parts = list(parts)
        """URIs of all parts of the attempt, including those that are being written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.shutdown(wait=True)

    @property
    def idle(self) -> bool:
        """Whether everything that was handed over is stored."""
        return self._last is None or self._last.done()

    def check(self) -> None:
        """Raise the error that kept a part from being written."""
        if self._last is not None and self._last.done():
            self._last.result()

    def close(self) -> None:
        """Wait until everything that was handed over is stored.

        Raises:
            ArtifactError: it cannot be stored.
        """
        self._writer.shutdown(wait=True)
        self.check()

    def publish(self, finished: Sequence[GeneratedSample], partial: Sequence[GeneratedSample]) -> None:
        """Hand a part over; do nothing if it is empty."""
        if finished or partial:
            uri = artifacts.join(self._sink, f"part-{self._next:06d}.parquet")
            self._next += 1
            self.parts.append(uri)
            self._last = self._writer.submit(self._write, self._last, uri, finished, partial)

    def _write(
        self,
        previous: "Future[None] | None",
        uri: str,
        finished: Sequence[GeneratedSample],
        partial: Sequence[GeneratedSample],
    ) -> None:
        if previous is not None:
            previous.result()
        write_rollouts(uri, [*finished, *partial])
        # The announcement of a part may be cut short. Then at least its unfinished samples are known.
        if partial:
            self._emit(Partial(samples=announced(partial), part=uri))
        if finished:
            self._emit(Samples(samples=announced(finished), part=uri))


def announced(rollouts: Iterable[GeneratedSample]) -> list[FinishedSample]:
    """Return samples as an event names them."""
    return [
        FinishedSample(
            prompt=rollout.prompt,
            index=rollout.index,
            tokens=rollout.sampled_tokens,
            finish_reason=rollout.finish_reason,
            away_seconds=None if rollout.outcome is None else rollout.outcome["seconds_away"],
            given_tokens=len(rollout.response_tokens) - rollout.sampled_tokens,
        )
        for rollout in rollouts
    ]


def _number(part: str) -> int:
    return int(part.rsplit("-", 1)[1].removesuffix(".parquet"))
