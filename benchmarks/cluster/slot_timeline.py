"""A timeline of the work on each slot, from the changes of state that pods go through."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rlhfless_operator.platforms.base import StateChange

_AWAKE = ("busy", "switching", "idle", "draining")
"""States in which a pod has its slots."""


@dataclass(frozen=True)
class Span:
    """A pod was in a state from `start` to `end`, monotonic seconds."""

    job: str
    pod: str
    stage: str
    state: str
    start: float
    end: float


@dataclass
class Timeline:
    """Who had which slot when."""

    spans: list[Span] = field(default_factory=list)
    _homes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _open: dict[str, tuple[str, StateChange]] = field(default_factory=dict)

    def placed(self, pod: str, slots: Sequence[str]) -> None:
        """A pod was given slots."""
        self._homes[pod] = tuple(slots)

    def observe(self, job: str, change: StateChange) -> None:
        """A pod changed its state."""
        before = self._open.get(change.instance)
        if before is not None:
            _, then = before
            self.spans.append(Span(job, change.instance, then.stage, then.state, then.at, change.at))
        self._open[change.instance] = (job, change)

    def document(self, begun: float, scale: float) -> list[dict[str, Any]]:
        """All spans with the slots of their pods, in emulated seconds after `begun`."""
        return [
            {
                "job": each.job,
                "stage": each.stage,
                "state": each.state,
                "slots": list(self._homes.get(each.pod, ())),
                "start": round((each.start - begun) / scale, 2),
                "end": round((each.end - begun) / scale, 2),
            }
            for each in self.spans
        ]

    @property
    def pods(self) -> int:
        """Pods that were ever made."""
        return len(self._homes)

    def work_on(self, slot: str) -> list[Span]:
        """What pods did on a slot."""
        return [each for each in self.spans if each.state == "busy" and slot in self._homes.get(each.pod, ())]

    def first_work(self, job: str, stage: str) -> float:
        """When a stage of a job worked for the first time."""
        return min(each.start for each in self.spans if (each.job, each.stage, each.state) == (job, stage, "busy"))

    def shares(self, slots: int, start: float, end: float, *, job: str | None = None) -> dict[str, float]:
        """Parts of all slots' time between two moments: at work, changing hands, awake without work, and free.

        Args:
            job: the only one that counts; all if left out.
        """
        seconds: dict[str, float] = defaultdict(float)
        for each in self.spans:
            held = max(0.0, min(end, each.end) - max(start, each.start))
            if each.state in _AWAKE and job in (None, each.job):
                seconds[each.state] += held * len(self._homes.get(each.pod, ()))
        whole = slots * (end - start)
        shares = {state: seconds[state] / whole for state in _AWAKE}
        return shares | {"free": 1 - sum(shares.values())}

    def changes_of_hands(self, scale: float) -> dict[str, Any]:
        """How often a slot went from one pod to another that follows at once, and what is between their work: putting
        one to sleep and waking the other. In emulated seconds."""
        found: list[float] = []
        for slot in {slot for home in self._homes.values() for slot in home}:
            switches = [
                each for each in self.spans if each.state == "switching" and slot in self._homes.get(each.pod, ())
            ]
            work = sorted(self.work_on(slot), key=lambda each: each.start)
            for first, then in pairwise(work):
                between = [each for each in switches if first.end <= each.start < then.start]
                if first.pod != then.pod and between:
                    found.append(sum(each.end - each.start for each in between) / scale)
        if not found:
            return {"count": 0}
        found.sort()
        return {
            "count": len(found),
            "mean": statistics.fmean(found),
            "p50": found[len(found) // 2],
            "p95": found[int(len(found) * 0.95)],
        }
