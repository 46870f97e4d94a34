"""The time in which a slot changes hands and its parts, from the logs of the pods that use it in turns."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

WORK = ("first tokens sampled", "model loaded", "learning begins")
"""What instances of generation, of preparation and of learning log once they have their memory again and work."""
PARTS = ("deciding", "sleeping", "asking", "weights", "first_pass")
"""Parts of a change of hands, in their order."""


@dataclass(frozen=True)
class HandOver:
    """A slot's change from one pod to another. All times are in seconds."""

    kind: str
    """The two stages."""
    step: int
    """The training step that the other one's task is of."""
    deciding: float
    """From the end of the one's task until it is put to sleep: the driver hears of the end, makes the next request, and
    asks for the sleep."""
    sleeping: float
    """Giving the memory back."""
    asking: float
    """From the end of the sleep until the other pod begins with the task."""
    weights: float
    """Reading weights."""
    first_pass: float
    """The rest: until generation has sampled its first tokens, or another stage has read what it works on."""

    @property
    def seconds(self) -> float:
        """From the last byte of the one to the first token, or the first work, of the other."""
        return self.until_awake + self.first_pass

    @property
    def until_awake(self) -> float:
        """The same without the first pass, which is work: what the slot's change alone costs."""
        return self.deciding + self.sleeping + self.asking + self.weights


def hand_overs(lines: Iterable[Mapping[str, Any]]) -> list[HandOver]:
    """The changes of hands on one slot, in their order.

    Args:
        lines: of the logs of all pods of the slot, as pods write them, in any order; `instance` is the pod.
    """
    found = []
    chain: list[Mapping[str, Any]] = []
    """The end of a task, the sleep of its pod, and the start of another pod's task, as far as they have come."""
    for line in sorted(lines, key=lambda each: str(each["time"])):
        message, pods = line["message"], [each["instance"] for each in chain]
        if message == "task ended":
            chain = [line]
        elif message == "instance sleeps" and pods == [line["instance"]]:
            chain.append(line)
        elif message == "task started":
            chain = [*chain, line] if len(chain) == 2 and line["instance"] not in pods else []
        elif message in WORK and len(chain) == 3 and line["instance"] == pods[-1]:
            found.append(_hand_over(*chain, line))
            chain = []
    return found


def _hand_over(
    ended: Mapping[str, Any], slept: Mapping[str, Any], started: Mapping[str, Any], works: Mapping[str, Any]
) -> HandOver:
    # Lines have milliseconds, the sleep's own seconds are finer.
    sleeping = min(float(slept["seconds"]), _seconds(ended, slept))
    weights = min(float(works.get("weights_seconds", 0.0)), _seconds(started, works))
    return HandOver(
        kind=f"{ended['stage']} to {started['stage']}",
        step=started["step"],
        deciding=_seconds(ended, slept) - sleeping,
        sleeping=sleeping,
        asking=_seconds(slept, started),
        weights=weights,
        first_pass=_seconds(started, works) - weights,
    )


def summary(found: Sequence[HandOver]) -> dict[str, Any]:
    """Percentiles of all, of each kind, and the mean of each part."""
    kinds = {kind: [each for each in found if each.kind == kind] for kind in sorted({each.kind for each in found})}
    return {"all": _figures(found), **{kind: _figures(each) for kind, each in kinds.items()}}


def _figures(found: Sequence[HandOver]) -> dict[str, Any]:
    return {
        "count": len(found),
        "to_the_first_token": _percentiles([each.seconds for each in found]),
        "until_awake": _percentiles([each.until_awake for each in found]),
        "mean_of_parts": {part: _rounded(statistics.fmean(getattr(each, part) for each in found)) for part in PARTS},
        "p95_of_parts": {
            part: _rounded(percentile(sorted(getattr(each, part) for each in found), 0.95)) for part in PARTS
        },
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    shares = {"p50": percentile(ordered, 0.5), "p95": percentile(ordered, 0.95), "max": ordered[-1]}
    return {name: _rounded(each) for name, each in shares.items()}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least of the numbers that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _seconds(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    return (datetime.fromisoformat(after["time"]) - datetime.fromisoformat(before["time"])).total_seconds()


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
