"""Attention with one query token a row that does not copy keys and values for each head, and its masks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhfless_functions.model.attention_masks import KINDS, LayerMasks
from rlhfless_functions.runtime.task import TaskError

GROUPED = "rlhfless_grouped"
"""Name of this attention among transformers' implementations."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute scaled dot-product attention. With one query token a row, the heads that share keys are the rows of one
    product.

    transformers' own implementation copies the cache for every head of a group at every token, which costs more than
    the attention itself. It still computes passes of more than one token a row.

    Args:
        query: [rows, heads, tokens, head size].
        key: [rows, key-value heads, window, head size], like `value`.
        attention_mask: [rows, 1, tokens, window] or None, which is causal.

    Returns:
        [rows, tokens, heads, head size], and no attention weights.
    """
    rows, heads, tokens, size = query.shape
    if tokens > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    key_heads = key.shape[1]
    grouped = query.view(rows, key_heads, heads // key_heads, size)
    by_slot = _by_slot.get()
    if by_slot is None:
        output = _attend(grouped, key, value, attention_mask, scaling)
    else:
        output = _attend_by_slot(by_slot, grouped, key, value, attention_mask, scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


_MOST_HEADS = 3
"""Heads of one product on a CPU. With four or more heads and a long window (from 224 tokens on, torch 2.13 on an AMD
EPYC), the product adds keys and values in another order, even if the mask hides the rest of the window. A sequence's
numbers would then depend on the other sequences of its batch."""


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Compute the attention of the heads that share keys. On a CPU a head's numbers depend neither on the other heads
    nor on the tokens that the mask hides.

    Args:
        query: [rows, key-value heads, heads that share keys, head size].
        mask: [rows, 1, 1, window].
    """
    if query.device.type != "cpu" or query.shape[2] <= _MOST_HEADS:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    parts = [
        scaled_dot_product_attention(part, key, value, attn_mask=mask, scale=scaling)
        for part in query.split(_MOST_HEADS, dim=2)
    ]
    return torch.cat(parts, dim=2)


@dataclass(frozen=True)
class RowsBySlot:
    """The slot from which each row of a pass reads keys and values."""

    slots: torch.Tensor
    """[rows] slot of each row."""
    used: int
    """Number of rows at the beginning whose slots are the first slots, in order."""
    runs: Sequence[tuple[int, int, int]]
    """(slot, first row, last row + 1) of the later rows that read the same slot."""


_by_slot: ContextVar[RowsBySlot | None] = ContextVar("rows_by_slot", default=None)
_GATHERED_ROWS = 64
"""Rows whose keys and values are copied at a time: few enough to use the same memory again for the next rows."""
_LEAST_RUN = 4
"""Least number of rows of one slot for which a call of their own costs less than copies of the slot's keys and
values."""


@contextmanager
def attending_by_slot(rows: RowsBySlot) -> Iterator[None]:
    """Let attention read keys and values by slot instead of by row."""
    token = _by_slot.set(rows)
    try:
        yield
    finally:
        _by_slot.reset(token)


def _attend_by_slot(
    rows: RowsBySlot,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Do the same as `attend` with `key` and `value` of all slots. A row's numbers do not depend on how rows are
    grouped here."""
    assert mask is not None
    used = rows.used
    parts = [_attend(query[:used], key[:used], value[:used], mask[:used], scaling)] if used else []

    def attend(first: int, last: int, its_key: torch.Tensor, its_value: torch.Tensor) -> None:
        parts.append(_attend(query[first:last], its_key, its_value, mask[first:last], scaling))

    def gather(first: int, last: int) -> None:
        for start in range(first, last, _GATHERED_ROWS):
            end = min(last, start + _GATHERED_ROWS)
            slots = rows.slots[start:end]
            attend(start, end, key.index_select(0, slots), value.index_select(0, slots))

    done = used
    for slot, first, last in rows.runs:
        if last - first >= _LEAST_RUN:
            gather(done, first)
            its_key, its_value = (each[slot : slot + 1].expand(last - first, -1, -1, -1) for each in (key, value))
            attend(first, last, its_key, its_value)
            done = last
    gather(done, len(rows.slots))
    return torch.cat(parts)


AttentionInterface.register(GROUPED, grouped_attention)
# The model makes its own masks for whole prompts.
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class Masks:
    """Makes the `attention_mask` of passes with one token a row: one mask, or one for each kind of the model's layers.

    Args:
        config: configuration of the model's text part.

    Raises:
        TaskError: `model_unloadable` for layers that are not attention over keys and values.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._layers = LayerMasks.of(config)
        if unknown := self._layers.kinds - KINDS:
            raise TaskError(
                "model_unloadable",
                f"the transformers engine can't generate with {config.model_type}'s layers of kind"
                f" {', '.join(sorted(unknown))}; use a model with full or sliding-window attention",
            )

    def decode(self, positions: torch.Tensor, window: int, dtype: torch.dtype) -> Any:
        """Return masks of one token a row.

        Args:
            positions: [rows] position of each row's token.
            window: tokens that attention reads.
            dtype: number format of the model.
        """
        distance = positions[:, None] - torch.arange(window, device=positions.device)
        return self._layers.make(distance[:, None, None, :], lambda visible: _additive(visible, dtype))


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Make the model attend through `grouped_attention`.

    Raises:
        TaskError: `model_unloadable` if its attention is not scaled dot-product attention.
    """
    current = model.config._attn_implementation
    if current not in ("sdpa", GROUPED):
        raise TaskError(
            "model_unloadable",
            f"the transformers engine needs a model with scaled dot-product attention;"
            f" {model.config.model_type} has {current!r}",
        )
    model.set_attn_implementation(GROUPED)
