"""The drafts that a run measured, for forecasts and rehearsals of it."""

from statistics import fmean

from rlhfless_functions import artifacts
from rlhfless_operator.planner.latency.drafting import Drafts
from rlhfless_operator.records.journal import read_lines

LAST_STEPS = 8
"""Number of newest steps that count: drafts get better as a run goes on."""

COVERAGE, ACCEPTANCE = "generation/drafts/coverage", "generation/drafts/acceptance"


def measured_drafts(place: str) -> Drafts | None:
    """Return how often a run's last steps had something to draft, and how often it was right.

    Args:
        place: the run's folder.

    Returns:
        None if it is no run's folder, or if the run drafted nothing.
    """
    lines = [line.get("metrics", {}) for line in read_lines(artifacts.join(place, "metrics.jsonl"))]
    coverage, acceptance = (
        [each[name] for each in lines if name in each][-LAST_STEPS:] for name in (COVERAGE, ACCEPTANCE)
    )
    return Drafts(fmean(coverage), fmean(acceptance)) if coverage and acceptance else None
