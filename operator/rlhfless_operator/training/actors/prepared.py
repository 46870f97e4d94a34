"""The outcome of preparing a step's groups."""

from dataclasses import dataclass, field

from rlhfless_functions.api import ExampleSample, GroupResult, PrepareResult
from rlhfless_operator.records.journal import add_metrics


@dataclass
class PreparationOutcome:
    """The outcome of preparing a step's groups."""

    chunks: dict[str, list[int]] = field(default_factory=dict)
    """Prompts of each prepared chunk, by the URI of its part."""
    groups: dict[int, GroupResult] = field(default_factory=dict)
    """Result of each prompt's group."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the chunks' metrics."""
    examples: list[ExampleSample] = field(default_factory=list)
    """Samples for people to read."""
    seconds: float = 0.0
    """Seconds of all requests, summed over the instances, without those of loading models."""
    loads: list[float] = field(default_factory=list)
    """Seconds for which models were loaded, of each request that did."""

    def add(self, result: PrepareResult) -> None:
        """Add the result of a chunk."""
        self.chunks[result.part] = [group.prompt for group in result.groups]
        self.examples += result.examples
        self.groups.update({group.prompt: group for group in result.groups})
        add_metrics(self.sums, result.metrics)
