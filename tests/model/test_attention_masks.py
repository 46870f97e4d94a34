"""Which layers of a model have a sliding window: `layer_types` says it, and `sliding_window` alone does not."""

from typing import Any

import pytest
import torch
from transformers import (
    Dots1Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)

from rlhfless_functions.model.attention_masks import LayerMasks

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS: list[tuple[PreTrainedConfig, set[str], int | None]] = [
    (LlamaConfig(), {FULL}, None),
    (MistralConfig(sliding_window=8), {FULL}, 8),  # No list: each of its layers slides.
    (MistralConfig(sliding_window=None), {FULL}, None),
    (Qwen2MoeConfig(), {FULL}, None),  # Its window becomes 0.
    (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=32), {FULL}, None),
    (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=2), {FULL, SLIDING}, 8),
    (Dots1Config(num_hidden_layers=4, max_window_layers=4), {FULL}, None),
    (Gemma3TextConfig(num_hidden_layers=2, layer_types=[FULL] * 2), {FULL}, None),
    (Gemma3TextConfig(num_hidden_layers=2, layer_types=[SLIDING] * 2, sliding_window=8), {SLIDING}, 8),
]


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: f"{case[0].model_type}, {case[2]}")
def test_a_window_counts_where_a_layer_uses_it(case: tuple[PreTrainedConfig, set[str], int | None]) -> None:
    config, kinds, window = case
    assert LayerMasks.of(config) == LayerMasks(frozenset(kinds), window)


def made(layers: LayerMasks) -> Any:
    steps = torch.arange(3)
    return layers.make(steps[:, None] - steps, lambda visible: visible)


def test_a_mask_hides_what_comes_later_and_what_the_window_has_left() -> None:
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    near = causal.triu(-1)
    assert torch.equal(made(LayerMasks(frozenset({FULL}), None)), causal)
    assert torch.equal(made(LayerMasks(frozenset({FULL}), 2)), near)
    by_kind = made(LayerMasks(frozenset({FULL, SLIDING}), 2))
    assert torch.equal(by_kind[FULL], causal)
    assert torch.equal(by_kind[SLIDING], near)
