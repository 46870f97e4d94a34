"""The control plane's records: a step's batch, and files that grow by a line per step."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, ExampleSample

_MOST_BYTES = 64 * 2**20


class PlanRecord(BaseModel):
    """A step's plan, in numbers."""

    policy: str
    actors: int
    expected_seconds: float
    expected_instance_seconds: float
    cheapest_instance_seconds: float
    """Cost of the cheapest plan, without a limit on its time."""
    lower_bound_instance_seconds: float
    rank_correlation: float | None = None
    """Spearman's ρ between predicted and actual lengths."""
    relative_error: float | None = None
    """Mean relative error of the predicted lengths."""
    preparers: int = 1
    """Most instances that prepare the step's groups at a time."""
    preparers_reason: str = ""
    """Reason for that number; empty if the plan had no choice."""
    holds: bool = False
    """Whether the instances of all stages stay for the whole step."""
    holds_reason: str = ""
    """Reason for that; empty if the plan had no choice."""
    prefixes: str
    """Whether the instances can share prefixes of prompts, with the reason."""


class StepBatch(BaseModel):
    """A generated and prepared step, from which a later driver continues with learning."""

    model_config = ConfigDict(frozen=True)

    batch: BatchReference
    cursor: dict[str, Any]
    """Position in the data after the step."""
    lengths: dict[int, list[int]]
    """Response tokens of every generated group, by prompt."""
    metrics: dict[str, float]
    plan: PlanRecord
    seconds: dict[str, float]
    """Seconds of generation, and of preparation after it."""
    samples: list[ExampleSample] = []
    """Some of its samples as text."""
    versions: dict[int, int] = {}
    """Oldest weights that sampled any of a group, by prompt; empty if one version sampled all groups."""


class JsonLines:
    """A file with one JSON object per line, rewritten whole at each append, because object stores can't append.

    Each line has its checksum.

    Args:
        uri: URI of the file.
        lines: its present content.
    """

    def __init__(self, uri: str, lines: list[dict[str, Any]]) -> None:
        self._uri = uri
        self._lines = [artifacts.sealed_json(line) for line in lines]

    def append(self, *items: Mapping[str, Any]) -> None:
        """Add lines."""
        self._lines += [artifacts.sealed_json(item) for item in items]
        self._write()

    def replace_last(self, item: Mapping[str, Any]) -> None:
        """Replace the last line."""
        self._lines[-1:] = [artifacts.sealed_json(item)]
        self._write()

    def _write(self) -> None:
        artifacts.write_bytes(self._uri, b"".join(line + b"\n" for line in self._lines))


def read_lines(uri: str) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object per line; empty if it does not exist.

    Raises:
        ArtifactCorruptError: a line is damaged; the message names it.
    """
    if not artifacts.exists(uri):
        return []
    found = []
    for number, line in enumerate(artifacts.read_bytes(uri, most=_MOST_BYTES).splitlines(), start=1):
        try:
            if line.strip():
                found.append(artifacts.parse_sealed(line))
        except ValueError as error:
            raise artifacts.ArtifactCorruptError(
                f"{uri}, line {number}, is damaged ({error}): restore the file from a copy, or remove it"
            ) from error
    return found


def add_metrics(sums: dict[str, float], more: Mapping[str, float]) -> None:
    """Add the sums and counts of a chunk, or of a group, to those of others."""
    for name, value in more.items():
        before = sums.get(name, 0.0)
        sums[name] = max(before, value) if name.endswith("/max") else before + value


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Convert the sums and counts of chunks to a step's metrics.

    `x/sum` divided by `x/count` is the mean `x`; with `x/square/sum` also `x/std`. If only one of the two exists, it is
    `x` itself.
    """
    metrics: dict[str, float] = {}
    for name, value in sums.items():
        stem, _, kind = name.rpartition("/")
        count = sums.get(f"{stem}/count", 0.0)
        if kind == "sum" and stem.endswith("/square"):
            of = stem.removesuffix("/square")
            number = sums.get(f"{of}/count", 0.0)
            if number:
                metrics[f"{of}/std"] = math.sqrt(max(0.0, value / number - (sums[f"{of}/sum"] / number) ** 2))
        elif kind == "sum" and f"{stem}/count" in sums:
            if count:
                metrics[stem] = value / count
        elif kind == "count" and f"{stem}/sum" in sums:
            continue
        else:
            metrics[stem if kind in ("sum", "count") else name] = value
    return metrics
