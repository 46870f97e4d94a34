"""The datasets of a job as its driver knows them: the length of each prompt, and the next prompts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.api import DataCounts, Purpose, TrainingProgress
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.data.cursor import DataCursor


class Prompts:
    """Prompts by row. The driver reads an index of their lengths, never their text.

    Args:
        spec: the job's.
        folder: where the datasets were materialised.
    """

    def __init__(self, spec: RLHFJobSpec, folder: JobFolder) -> None:
        self._spec = spec
        self._folder = folder
        self._tokens: dict[Purpose, list[int]] = {}
        self._prefix_trees: dict[Purpose, Mapping[str, Any] | None] = {}
        self._counts: dict[Purpose, DataCounts] = {}
        self.count = 0
        """Usable prompts of the training data; 0 until it is opened."""
        self.planned_steps = 0
        """Steps that the job is planned with, and the length of its schedule; 0 until the data is opened."""
        self.total_steps = 0
        """Steps of the whole job: those planned, or fewer if dynamic sampling uses up its epochs (`settle`)."""
        self.cursor = DataCursor(0, spec.seed, shuffle=False)
        """The position in the training data."""

    def open_training(self) -> None:
        """Open the training data, and go to its start.

        Raises:
            ValueError: it has too few prompts for a step.
        """
        self.count = self.open("training")
        per_step = self._spec.batch.prompts_per_step
        if self.count < per_step:
            counts = self._counts["training"]
            why = f" ({counts.left_out} rows were left out: {counts.reasons})" if counts.left_out else ""
            raise ValueError(
                f"data.source has {self.count} usable prompts, fewer than batch.promptsPerStep, {per_step}{why}"
            )
        data = self._spec.data
        sizes = self._counts["training"].sizes or [self.count]
        mix = [(size, part.weight) for size, part in zip(sizes, data.parts, strict=False)]
        self.cursor = DataCursor(self.count, self._spec.seed, shuffle=data.shuffle, mix=mix)
        self.planned_steps = self._spec.steps or -(-self.cursor.prompts_in(self._spec.epochs or 1) // per_step)
        self.total_steps = self.planned_steps

    @property
    def left(self) -> int | None:
        """Number of prompts that the job's epochs have left; None where replaced groups can't use them up."""
        if self._spec.epochs is None or not self._spec.algorithm.resolved().dynamic_sampling_rounds:
            return None
        return max(0, self.cursor.prompts_in(self._spec.epochs) - self.cursor.drawn)

    @property
    def passes(self) -> float:
        """Passes over the data that all prompts until the position make."""
        return self.cursor.drawn / max(1, self.cursor.prompts_in(1))

    def settle(self, step: int) -> str | None:
        """Note that the position is behind the prompts of a step; if the epochs have none left, the step is the last.

        Return a sentence for the user if it comes before the planned one.
        """
        if self.left != 0 or step >= self.planned_steps:
            return None
        self.total_steps = step
        return (
            f"step {step} of {self.planned_steps} planned is the last: it draws the last prompts of epochs:"
            f" {self._spec.epochs}, because groups that taught nothing were replaced"
        )

    def open(self, purpose: Purpose) -> int:
        """Open a materialised dataset; return how many prompts it has."""
        index = artifacts.read_json(artifacts.join(self._folder.data(purpose), "index.json"))
        self._tokens[purpose] = index["lengths"]
        self._prefix_trees[purpose] = index["prefixes"]
        self._counts[purpose] = DataCounts.model_validate(index["counts"])
        return len(index["lengths"])

    def progress(self, step: int, purpose: Purpose) -> TrainingProgress:
        """Return the position of the training for the rewards of a step's samples."""
        finished = step - 1 if purpose == "training" else step
        passes = self._spec.batch.prompts_per_step / max(1, self.count)
        epochs = self._spec.epochs or max(1, math.ceil(round(self.planned_steps * passes, 6)))
        total = max(1, self.planned_steps)
        return TrainingProgress(finished=finished, total=total, epoch=finished * passes, epochs=epochs)

    def go_to(self, position: dict[str, Any]) -> None:
        """Go to the position that a cursor's `state` names."""
        self.cursor = self.cursor.restored(position)

    def next(self, count: int) -> list[int]:
        """Return the next prompts; the position stays."""
        return self.cursor.restored(self.cursor.state()).draw(count)

    def tokens(self, purpose: Purpose) -> Sequence[int]:
        """Return the tokens of every prompt of a dataset, by row."""
        return self._tokens[purpose]

    def counts(self, purpose: Purpose) -> DataCounts:
        """Return the counts of an opened dataset's rows."""
        return self._counts[purpose]

    def prefix_tree(self, purpose: Purpose) -> Mapping[str, Any] | None:
        """Return the beginnings that the prompts of a dataset share; None if they share none."""
        return self._prefix_trees[purpose]
