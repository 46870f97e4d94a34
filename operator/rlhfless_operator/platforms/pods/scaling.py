"""The number of pods that a stage should have: a pure function of demand, requests and existing pods."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageSituation:
    """A stage's pods and requests at one moment."""

    wanted: int
    """Pods that the training loop holds."""
    requests: int
    """Requests under way."""
    sending: int
    """Requests that no pod has taken yet."""
    starting: int
    """Pods that are not ready yet."""
    busy: int
    """Pods that work on a request, or still publish after one."""
    idle_since: Sequence[float]
    """End of the last work of each other pod, in monotonic seconds."""


@dataclass(frozen=True)
class Scale:
    """The scale to set in Knative."""

    pods: int
    """Wanted number of pods."""
    review_at: float | None = None
    """Time of the next check even if nothing happens, in monotonic seconds."""

    @property
    def bounds(self) -> tuple[int, int]:
        """min-scale and max-scale. The latter is never 0, which would mean no limit."""
        return self.pods, max(1, self.pods)


def scale_of(now: StageSituation, *, asked: int | None = None, keep_alive: float, at: float) -> Scale:
    """Compute the number of pods.

    The number is never below the wanted pods, the requests, or the working pods. Of the surplus, pods that are not
    ready go first, then pods that have been idle for the keep-alive. No pod goes while a request is on its way, because
    it might be that request's pod. No unneeded pod is added: Knative may have released some of the listed pods already,
    and the news may still be on its way.

    Args:
        asked: the scale that was last set in Knative; None before the first.
        keep_alive: seconds that a surplus idle pod is kept.
        at: monotonic seconds.
    """
    needed = max(now.wanted, now.requests, now.busy)
    there = now.starting + now.busy + len(now.idle_since)
    surplus = there - needed
    if surplus <= 0:
        return Scale(needed)
    most = there if asked is None else max(needed, asked)
    if now.sending:
        return Scale(min(there, most))
    due = sorted(since + keep_alive for since in now.idle_since)
    released = min(surplus, now.starting + sum(time <= at for time in due))
    later = [time for time in due if time > at]
    review_at = later[0] if released < surplus and later else None
    return Scale(min(there - released, most), review_at)
