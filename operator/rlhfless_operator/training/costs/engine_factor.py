"""The ratio of an engine's seconds to those of its GPU's table in a run, for forecasts with that run's lengths."""

from statistics import fmean

from rlhfless_functions import artifacts
from rlhfless_operator.records.journal import read_lines
from rlhfless_operator.training.costs.measured_drafts import LAST_STEPS

ENGINE_FACTOR = "generation/engine_factor"


def measured_factor(place: str | None) -> float | None:
    """Return the mean of a run's last steps.

    Args:
        place: the run's folder.

    Returns:
        None if it is no run's folder, or its GPU has no table.
    """
    if place is None:
        return None
    lines = (line.get("metrics", {}) for line in read_lines(artifacts.join(place, "metrics.jsonl")))
    found = [metrics[ENGINE_FACTOR] for metrics in lines if ENGINE_FACTOR in metrics][-LAST_STEPS:]
    return fmean(found) if found else None
