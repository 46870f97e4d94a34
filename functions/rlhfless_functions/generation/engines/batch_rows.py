"""The rows of a continuous batch: the sequence in each, and its progress."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from rlhfless_functions.api import FinishReason
from rlhfless_functions.generation.engines.base import SequenceResult, SequenceTask
from rlhfless_functions.generation.engines.passes import index_of
from rlhfless_functions.generation.engines.randomness import signed_keys


class BatchRows:
    """One value for each row, on the device. A row without a sequence has length 0; passes may compute it.

    The `host_` arrays are a copy on the host: a step can be planned without waiting for the device. Every change is
    made to both.

    Args:
        rows: number of rows.
        most_tokens: most tokens of a response.
        device: device of the model.
    """

    def __init__(self, rows: int, most_tokens: int, device: torch.device) -> None:
        self._device = device
        self.inputs = self._vector(rows)
        """[rows] input token of the next pass."""
        self.lengths = self._vector(rows)
        """[rows] number of tokens whose keys and values are in the cache."""
        self.generated = self._vector(rows)
        """[rows] number of response tokens."""
        self.keys = self._vector(rows)
        """[rows] key of the sequence's random numbers."""
        self.active = self._vector(rows)
        """[rows] 1 if there is a sequence, else 0."""
        self.tokens = torch.zeros(rows, most_tokens, dtype=torch.long, device=device)
        """[rows, tokens] response tokens."""
        self.log_probs = torch.zeros(rows, most_tokens, device=device)
        """[rows, tokens] log-probabilities of the response tokens."""
        self.tasks: list[SequenceTask | None] = [None] * rows
        self.host_active = np.zeros(rows, dtype=bool)
        self.host_lengths = np.zeros(rows, dtype=np.int64)
        self.host_generated = np.zeros(rows, dtype=np.int64)

    def running(self) -> list[tuple[int, SequenceTask]]:
        """Return the rows with a sequence, each with its sequence."""
        return [(row, task) for row, task in enumerate(self.tasks) if task is not None]

    def task(self, row: int) -> SequenceTask:
        """Return the sequence in a row, which must have one."""
        task = self.tasks[row]
        assert task is not None
        return task

    def result(self, row: int, reason: FinishReason) -> SequenceResult:
        """Return the sequence in a row as it is now."""
        task, end = self.task(row), int(self.host_generated[row])
        tokens, log_probs = self.tokens[row, :end].tolist(), self.log_probs[row, :end].tolist()
        return SequenceResult(task.prompt, task.index, tokens, log_probs, reason, task.step)

    def seat(self, admitted: dict[int, SequenceTask]) -> None:
        """Put sequences into rows, with the tokens that were sampled before."""
        rows, tasks = list(admitted), list(admitted.values())
        for row, task in admitted.items():
            self.tasks[row] = task
            done = len(task.response_tokens)
            if done:
                self.tokens[row, :done] = torch.tensor(task.response_tokens, device=self._device)
                self.log_probs[row, :done] = torch.tensor(task.log_probs, device=self._device)
        generated = [len(task.response_tokens) for task in tasks]
        lengths = [len(task.prompt_tokens) - 1 + done for task, done in zip(tasks, generated, strict=True)]
        inputs = [(task.response_tokens or task.prompt_tokens)[-1] for task in tasks]
        self.host_active[rows] = True
        self.host_lengths[rows] = lengths
        self.host_generated[rows] = generated
        index = self._index(rows)
        self.active[index] = 1
        self.lengths[index] = self._index(lengths)
        self.generated[index] = self._index(generated)
        self.inputs[index] = self._index(inputs)
        self.keys[index] = self._index(signed_keys([task.seed for task in tasks]))

    def clear(self, rows: Sequence[int]) -> None:
        """Take the sequences out of rows."""
        self.leave(rows)
        self.set_lengths(dict.fromkeys(rows, 0))

    def leave(self, rows: Sequence[int]) -> None:
        """Take the sequences out of rows, and leave the lengths: passes write behind what is in the cache."""
        for row in rows:
            self.tasks[row] = None
        self.host_active[rows] = False
        self.host_generated[rows] = 0
        index = self._index(rows)
        for vector in (self.active, self.generated):
            vector.index_fill_(0, index, 0)

    def set_lengths(self, lengths: Mapping[int, int]) -> None:
        """Set the lengths of rows without a sequence."""
        if lengths:
            self.host_lengths[list(lengths)] = list(lengths.values())
            self.lengths[self._index(lengths)] = self._index(lengths.values())

    def move(self, sources: np.ndarray, holes: np.ndarray) -> None:
        """Move sequences into rows without one."""
        source_index, hole_index = self._index(sources), self._index(holes)
        for tensor in (
            self.inputs, self.lengths, self.generated, self.keys, self.active, self.tokens, self.log_probs,
        ):  # fmt: skip
            tensor[hole_index] = tensor[source_index]
        for vector in (self.active, self.lengths, self.generated):
            vector.index_fill_(0, source_index, 0)
        for array in (self.host_active, self.host_lengths, self.host_generated):
            array[holes] = array[sources]
            array[sources] = 0
        for source, hole in zip(sources.tolist(), holes.tolist(), strict=True):
            self.tasks[hole], self.tasks[source] = self.tasks[source], None

    def _vector(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, dtype=torch.long, device=self._device)

    def _index(self, values: Collection[int] | np.ndarray) -> torch.Tensor:
        return index_of(self._device, values)
