"""The report of a training step: losses and gradient norms of each update, statistics over all passes."""

from dataclasses import dataclass, field

import torch

from rlhfless_functions.algorithms.diagnostics import Moments, Statistics, add_statistics, summarize
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.learning.batch import TrainingBatch
from rlhfless_functions.model.micro_batches import Block


@dataclass
class Course:
    """One model's optimizer updates in a step."""

    losses: list[float] = field(default_factory=list)
    """Loss of each update."""
    gradient_norms: list[float] = field(default_factory=list)
    """Gradient norm of each update, before clipping."""


@dataclass
class StepReport:
    """The report of a step."""

    learning_rate: float
    policy: Course = field(default_factory=Course)
    critic: Course = field(default_factory=Course)
    statistics: Statistics = field(default_factory=dict)
    """Statistics over all epochs and micro-batches."""
    tokens: int = 0
    """Tokens that went through a forward and backward pass of the policy or, while it is frozen, of the critic."""
    shared_tokens: int = 0
    """Prompt tokens that were not computed, because another sample of the group had the same prompt."""

    def count(self, batch: TrainingBatch, block: Block) -> None:
        """Count the tokens of a block's passes."""
        rows = [row for run in block.runs for row in run]
        whole = sum(len(batch.samples[row].prompt_tokens) for row in rows)
        prompts = sum(len(batch.samples[row].prompt_tokens) for row in block.prompts) if block.prompts else whole
        self.tokens += prompts + sum(batch.lengths[row] for row in rows)
        self.shared_tokens += whole - prompts

    def add(self, statistics: Statistics) -> None:
        """Add a micro-batch's statistics."""
        self.statistics = add_statistics(self.statistics, statistics)

    def move(self, device: torch.device) -> None:
        """Move the statistics to a device."""
        self.statistics = {name: Moments(moments.data.to(device)) for name, moments in self.statistics.items()}

    def add_up(self, ranks: Ranks) -> None:
        """Add the counts of the other ranks."""
        parts = ranks.all((self.tokens, {name: moments.data.cpu() for name, moments in self.statistics.items()}))
        if ranks.size > 1:
            self.tokens = sum(tokens for tokens, _ in parts)
            self.statistics = {}
            for _, statistics in parts:
                self.add({name: Moments(data) for name, data in statistics.items()})

    def summary(self) -> dict[str, float]:
        """Return a summary of the statistics."""
        return summarize(self.statistics)
