"""The passes of a model over a slot cache: whole prompts, continued responses, and one token per row."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from transformers import PreTrainedModel

from rlhfless_functions.generation.engines.attention import Masks, RowsBySlot, attending_by_slot
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.kv_cache import SlotCache, padded
from rlhfless_functions.generation.engines.prefill import prefill
from rlhfless_functions.weights import ArrivingPolicy, NotArrivedError

CPU_ROWS = 16
"""On a CPU the number of rows of a pass is a multiple of this. With so many rows, matrix kernels always add numbers in
the same order."""
REPLAY_ROWS = 256
"""Tokens of continued responses computed in one pass."""


def padded_rows(rows: int, device: torch.device) -> int:
    """Return the number of rows that a decode pass of so many sequences computes.

    On a GPU, all up to 8, and beyond that 4 to 8 numbers between two powers of 2: each is a graph of its own.
    """
    multiple = CPU_ROWS if device.type == "cpu" else 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // multiple) * multiple


def index_of(device: torch.device, values: Collection[int] | np.ndarray) -> torch.Tensor:
    """Return a tensor of integers on a device."""
    return torch.tensor(list(values), dtype=torch.long, device=device)


class ModelPasses:
    """A model, its masks, and the cache that its passes fill.

    Args:
        model: on its device, in evaluation mode.
        masks: masks of the model.
        cache: cache of its keys and values.
        arriving: the model's weights, if they may still be on their way.
    """

    def __init__(
        self, model: PreTrainedModel, masks: Masks, cache: SlotCache, arriving: ArrivingPolicy | None = None
    ) -> None:
        self._model = model
        self._masks = masks
        self._cache = cache
        self._arriving = arriving
        self._device = model.device
        self._dtype = model.dtype

    @property
    def awaits_weights(self) -> bool:
        """Whether the model's weights may still be on their way."""
        return self._arriving is not None

    def copy(self, admitted: dict[int, tuple[SequenceTask, int]]) -> None:
        """Copy each prompt from a row that holds it. All prompts are read before any row is overwritten."""
        if admitted:
            tokens = max(len(task.prompt_tokens) for task, _ in admitted.values())
            sources = [source for _, source in admitted.values()]
            self._cache.copy(index_of(self._device, sources), index_of(self._device, admitted), tokens)

    def prefill(self, admitted: dict[int, SequenceTask]) -> int:
        """Compute each prompt once, and copy it to the rows of its group. Return the number of computed tokens."""
        prompts = {task.prompt: task.prompt_tokens for task in admitted.values()}
        if self._arriving is not None:
            # Each layer waits for its weights. Its results count only if the weights turn out to be sound.
            try:
                self._prefill(admitted, prompts)
                computed = True
            except NotArrivedError:
                computed = False
            if self.settle(computed=computed):
                return sum(map(len, prompts.values()))
        self._prefill(admitted, prompts)
        return sum(map(len, prompts.values()))

    def settle(self, *, computed: bool = False) -> bool:
        """Wait until the weights are there and checked.

        Args:
            computed: whether a pass was computed meanwhile.

        Returns:
            Whether the numbers of this pass can be used.

        Raises:
            TaskError: the weights cannot be had.
        """
        arriving, self._arriving = self._arriving, None
        return arriving.settle(computed=computed) if arriving is not None else computed

    def _prefill(self, admitted: dict[int, SequenceTask], prompts: dict[int, Sequence[int]]) -> None:
        for members, layers in prefill(self._model, prompts):
            row_of = {prompt: row for row, prompt in enumerate(members)}
            rows = {slot: row_of[task.prompt] for slot, task in admitted.items() if task.prompt in row_of}
            self._cache.store(layers, index_of(self._device, rows.values()), index_of(self._device, rows))

    def replay(self, continued: Mapping[int, tuple[SequenceTask, int]]) -> None:
        """Compute keys and values of the last tokens of prompts and of all response tokens but the last, many at once.

        Args:
            continued: by slot, the task and the number of these tokens that the slot has already.
        """
        rows = [
            (slot, position, token)
            for slot, (task, known) in continued.items()
            for position, token in enumerate(
                [task.prompt_tokens[-1], *task.response_tokens[:-1]][known:], len(task.prompt_tokens) - 1 + known
            )
        ]
        for start in range(0, len(rows), REPLAY_ROWS):
            self._replay(rows[start : start + REPLAY_ROWS])

    def _replay(self, rows: list[tuple[int, int, int]]) -> None:
        """Compute tokens (slot, position, token) in one pass. Those of a slot are adjacent and in order."""
        if self._device.type == "cpu":
            # Padding rows compute the last token again and write the same numbers.
            rows = rows + rows[-1:] * (padded_rows(len(rows), self._device) - len(rows))
        slots, positions, tokens = (index_of(self._device, each) for each in zip(*rows, strict=True))
        window = padded(max(position for _, position, _ in rows) + 1)
        if rows[0][0] == rows[-1][0]:
            self._cache.replay(rows[0][0], positions, window)
            self.forward(tokens, positions, window)
            return
        self._cache.verify(slots, positions, window)
        with attending_by_slot(RowsBySlot(slots, 0, _runs([slot for slot, *_ in rows]))):
            self.forward(tokens, positions, window)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of a pass with one token a row. The cache already knows the tokens'
        places."""
        self.settle()
        output = self._model(
            input_ids=inputs[:, None],
            attention_mask=self._masks.decode(positions, window, self._dtype),
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, 0]
        return logits


def _runs(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (slot, first row, last row + 1) of adjacent rows of one slot."""
    runs, first = [], 0
    for slot, same in groupby(slots):
        last = first + len(list(same))
        runs.append((slot, first, last))
        first = last
    return runs
