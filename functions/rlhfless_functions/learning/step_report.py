"""How a training step went: losses and gradient norms of each update, statistics over all of its passes."""

from dataclasses import dataclass, field

import torch

from rlhfless_functions.algorithms.diagnostics import Moments, Statistics, add_statistics, summarize
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.learning.batch import TrainingBatch
from rlhfless_functions.model.micro_batches import Block


@dataclass
class Course:
    """How one model's learning went over the optimizer updates of a step."""

    losses: list[float] = field(default_factory=list)
    """Of each update."""
    gradient_norms: list[float] = field(default_factory=list)
    """Of each update, before clipping."""


@dataclass
class StepReport:
    """How a step went."""

    learning_rate: float
    policy: Course = field(default_factory=Course)
    critic: Course = field(default_factory=Course)
    statistics: Statistics = field(default_factory=dict)
    """Over all epochs and micro-batches."""
    tokens: int = 0
    """Tokens that went through a forward and backward pass of the policy or, while it is frozen, of the critic."""
    shared_tokens: int = 0
    """Prompt tokens that did not, because another sample of the group had brought them."""

    def count(self, batch: TrainingBatch, block: Block) -> None:
        """Count what a block's passes compute."""
        rows = [row for run in block.runs for row in run]
        whole = sum(len(batch.samples[row].prompt_tokens) for row in rows)
        prompts = sum(len(batch.samples[row].prompt_tokens) for row in block.prompts) if block.prompts else whole
        self.tokens += prompts + sum(batch.lengths[row] for row in rows)
        self.shared_tokens += whole - prompts

    def add(self, statistics: Statistics) -> None:
        """Take in a micro-batch's statistics."""
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
        """The statistics' summary."""
        return summarize(self.statistics)
