"""Compare the cost of a run's instances with the lowest possible cost of keeping and releasing them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfless_functions.api import STAGES
from rlhfless_operator.planner.step.bounds import least_held
from rlhfless_operator.records.record import SpanRecord


@dataclass(frozen=True)
class Hindsight:
    """Instance-seconds of a stage, or of all stages."""

    paid: float
    """Instance-seconds in all states."""
    least: float
    """Lowest possible instance-seconds, for the same work at the same times, with the starts and drains of this run."""

    @property
    def ratio(self) -> float:
        """Paid divided by least; 1 if nothing was paid."""
        return self.paid / self.least if self.least else 1.0


def hindsight(spans: Sequence[SpanRecord]) -> dict[str, Hindsight]:
    """Compute both for each stage with work, in the order of a step.

    Args:
        spans: of the whole run.
    """
    by_stage: Mapping[str, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        by_stage[span.stage].append(span)
    found = {stage: _of_stage(by_stage[stage]) for stage in STAGES if stage in by_stage}
    return {stage: each for stage, each in found.items() if each.least}


def total(stages: Mapping[str, Hindsight]) -> Hindsight:
    """Return the sum over all stages."""
    return Hindsight(sum(each.paid for each in stages.values()), sum(each.least for each in stages.values()))


def _of_stage(spans: Sequence[SpanRecord]) -> Hindsight:
    # The ledger splits work at the end of a step. A gap of length zero costs nothing.
    uses = [(span.start, span.end) for span in spans if span.state == "busy"]
    least = least_held(uses, start_seconds=_mean(spans, "starting"), drain_seconds=_mean(spans, "draining"))
    return Hindsight(sum(span.end - span.start for span in spans), least)


def _mean(spans: Sequence[SpanRecord], state: str) -> float:
    """Return the mean seconds in a state, over the instances that were in it."""
    of_state = [span for span in spans if span.state == state]
    instances = {span.instance for span in of_state}
    return sum(span.end - span.start for span in of_state) / len(instances) if instances else 0.0
