"""The check that the packages of the job's trackers are installed."""

import importlib.util

from rlhfless_operator.job.outputs import TrackingSpec

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Fields of `spec.tracking`, and the packages of the same names."""


def missing_trackers(tracking: TrackingSpec) -> list[str]:
    """Return the job's trackers whose packages are not installed."""
    return [name for name in TRACKERS if getattr(tracking, name) and not _installed(name)]


def _installed(name: str) -> bool:
    found = importlib.util.find_spec(name)
    # A folder with that name in the working directory, such as wandb's own logs, has no origin.
    return found is not None and found.origin is not None
