"""How well a run drafted, as its metrics say: what forecasts and rehearsals of it draft with."""

from statistics import fmean

from rlhfless_functions import artifacts
from rlhfless_operator.planner.latency.drafting import Drafts
from rlhfless_operator.records.journal import read_lines

LAST_STEPS = 8
"""Steps that count: drafts get better while a run goes on."""

COVERAGE, ACCEPTANCE = "generation/drafts/coverage", "generation/drafts/acceptance"


def measured_drafts(place: str) -> Drafts | None:
    """How often there was something to draft in the last steps of a run, and how often it was right.

    Args:
        place: the run's folder.

    Returns:
        None where it is no run's folder, or one of a run that drafted nothing.
    """
    lines = [line.get("metrics", {}) for line in read_lines(artifacts.join(place, "metrics.jsonl"))]
    coverage, acceptance = (
        [each[name] for each in lines if name in each][-LAST_STEPS:] for name in (COVERAGE, ACCEPTANCE)
    )
    return Drafts(fmean(coverage), fmean(acceptance)) if coverage and acceptance else None
