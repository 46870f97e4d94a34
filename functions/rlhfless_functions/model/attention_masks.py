"""The masks that a model's layers need, for passes that make them themselves: which layers have a sliding window."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that are attention over keys and values, by transformers' names."""


@dataclass(frozen=True)
class LayerMasks:
    """The layers of a model by the tokens that they see.

    `layer_types` alone says which layers have the window of `sliding_window`. Many configurations have a window that
    none of their layers uses. Without `layer_types`, all layers have it.
    """

    kinds: frozenset[str]
    """Kinds of the layers."""
    window: int | None
    """Tokens that a layer with a sliding window sees, the token itself included. None if no layer has one."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LayerMasks":
        """Read the configuration of a model or of its text part."""
        text = config.get_text_config()
        window: int | None = getattr(text, "sliding_window", None)
        kinds = frozenset(getattr(text, "layer_types", None) or [])
        if kinds and "sliding_attention" not in kinds:
            window = None
        return cls(kinds or frozenset({"full_attention"}), window)

    def make(self, distance: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return the `attention_mask` that the model takes: one mask, or one for each kind of layer if some slide.

        Args:
            distance: position of a query minus that of a key; below 0 if the query must not see the key.
            make: makes a mask from a bool tensor of the same shape, True if a query sees a key.
        """
        seen = distance >= 0
        if self.window is None:
            return make(seen)
        near = make(seen & (distance < self.window))
        return {"full_attention": make(seen), "sliding_attention": near} if self.slides_by_kind else near

    @property
    def slides_by_kind(self) -> bool:
        """Whether the model takes a mask for each kind of its layers."""
        return "sliding_attention" in self.kinds
