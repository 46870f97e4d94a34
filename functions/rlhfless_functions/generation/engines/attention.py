"""Attention of one token a row without repeating keys and values, and the masks that go with it."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

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
    """Scaled dot-product attention; of one query token a row, the heads that share keys are the rows of one product.

    transformers' own form copies the cache once for every head of a group at every token, which costs more than the
    attention itself. Passes of more than one token go to it.

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
    output = scaled_dot_product_attention(
        query.view(rows, key_heads, heads // key_heads, size), key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(GROUPED, grouped_attention)


class Masks:
    """What a model takes as `attention_mask`: none, a 4-dimensional mask, or one for each kind of its layers.

    Args:
        config: of the model's text part.

    Raises:
        TaskError: `model_unloadable` for layers that are not attention over keys and values.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise TaskError(
                "model_unloadable",
                f"the transformers engine cannot generate with {config.model_type}'s layers of kind"
                f" {', '.join(sorted(unknown))}: take a model with full or sliding-window attention",
            )
        self._window: int | None = getattr(config, "sliding_window", None)
        self._by_kind = "sliding_attention" in kinds

    def decode(self, positions: torch.Tensor, window: int, dtype: torch.dtype) -> Any:
        """Masks of one token a row.

        Args:
            positions: [rows] position of each row's token.
            window: tokens that attention reads.
            dtype: of the model.
        """
        distance = positions[:, None] - torch.arange(window, device=positions.device)
        return self._masks(distance[:, None, None, :], dtype)

    def prefill(self, tokens: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Masks of right-padded prompts of this padded length, each token a query."""
        if self._window is None or tokens <= self._window:
            return {"full_attention": None, "sliding_attention": None} if self._by_kind else None
        steps = torch.arange(tokens, device=device)
        return self._masks((steps[:, None] - steps)[None, None], dtype)

    def _masks(self, distance: torch.Tensor, dtype: torch.dtype) -> Any:
        full = _additive(distance >= 0, dtype)
        if self._window is None:
            return full
        sliding = _additive((distance >= 0) & (distance < self._window), dtype)
        return {"full_attention": full, "sliding_attention": sliding} if self._by_kind else sliding


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
