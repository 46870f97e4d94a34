"""How many pods a stage is to have: a pure function of what is wanted, what is under way and what there is."""

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
    """Those of them that no pod has taken yet."""
    starting: int
    """Pods that are not ready yet."""
    busy: int
    """Pods that work on a request, or still publish what one left."""
    idle_since: Sequence[float]
    """When each of the others had its last work, in monotonic seconds."""


@dataclass(frozen=True)
class Scale:
    """What Knative is told."""

    pods: int
    """Pods that there are to be."""
    review_at: float | None = None
    """When to look again though nothing has happened, in monotonic seconds."""

    @property
    def bounds(self) -> tuple[int, int]:
        """min-scale and max-scale; a max-scale of 0 would mean that there is no limit."""
        return self.pods, max(1, self.pods)


def scale_of(now: StageSituation, *, asked: int | None = None, keep_alive: float, at: float) -> Scale:
    """How many pods there are to be.

    Never fewer than are wanted, than there are requests, or than work. Of the surplus, what is not ready yet goes first
    and then what has been idle for as long as it is kept. Nothing goes while a request is on its way to a pod: it might
    be that one. Nor does anything come that is not needed: among the pods that are there may be some that Knative has
    let go of already, of which the news is on its way.

    Args:
        asked: what Knative was last told; None before it was told anything.
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
