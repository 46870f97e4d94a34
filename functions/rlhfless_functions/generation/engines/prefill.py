"""Keys and values of whole prompts, in as few passes as leave every prompt's numbers independent of the others'."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rlhfless_functions.generation.engines.attention import Masks
from rlhfless_functions.generation.engines.kv_cache import padded


def prefill(
    model: PreTrainedModel, masks: Masks, prompts: Mapping[int, Sequence[int]]
) -> Iterator[tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Compute each prompt but its last token, right-padded to whole blocks.

    Prompts of one padded length share a pass, and no others: the shape of a prompt's own attention is then a function
    of the prompt alone, and on a CPU in float32 so are its bits.

    Args:
        model: on its device.
        masks: of the model.
        prompts: tokens by prompt; a prompt of a single token has nothing to compute and is skipped.

    Yields:
        The prompts of a pass, and of each layer keys and values, [prompts, heads, padded length, head size].
    """
    buckets: dict[int, list[int]] = {}
    for prompt, tokens in prompts.items():
        if len(tokens) > 1:
            buckets.setdefault(padded(len(tokens) - 1), []).append(prompt)
    for width, members in buckets.items():
        rows = [[*prompts[prompt][:-1], *[0] * (width - len(prompts[prompt]) + 1)] for prompt in members]
        cache = DynamicCache()
        model(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=masks.prefill(width, model.device, model.dtype),
            position_ids=torch.arange(width, device=model.device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        layers: list[Any] = cache.layers
        yield members, [(layer.keys, layer.values) for layer in layers]
