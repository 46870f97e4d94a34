"""The time of a run's samples in their environments, and the tokens that they were given, for forecasts of it."""

from dataclasses import dataclass
from statistics import fmean

from rlhfless_functions import artifacts
from rlhfless_operator.records.journal import read_lines
from rlhfless_operator.training.costs.measured_drafts import LAST_STEPS


@dataclass(frozen=True)
class ActingByToken:
    """Means of a sample in an environment."""

    away: float
    """Seconds that it is with its environment for each token that it samples."""
    given: float
    """Tokens that it is given for each one that it samples."""


def measured_acting(place: str) -> ActingByToken | None:
    """Return how the samples of a run's last steps acted.

    Args:
        place: the run's folder.

    Returns:
        None if it is no run's folder, or if its samples acted nowhere.
    """
    lines = [line.get("metrics", {}) for line in read_lines(artifacts.join(place, "metrics.jsonl"))]
    steps = [each for each in lines if each.get("environment/turns") and each.get("lengths")][-LAST_STEPS:]
    if not steps:
        return None
    return ActingByToken(
        away=fmean(each.get("environment/seconds_away", 0.0) / each["lengths"] for each in steps),
        given=fmean(each.get("environment/given", 0.0) / each["lengths"] for each in steps),
    )
