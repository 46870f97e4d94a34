"""Keys and values of whole prompts, in few passes, without letting a prompt's numbers depend on other prompts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rlhfless_functions.generation.engines.kv_cache import padded


def prefill(
    model: PreTrainedModel, prompts: Mapping[int, Sequence[int]]
) -> Iterator[tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Compute each prompt without its last token, right-padded to whole blocks.

    Only prompts of the same padded length share a pass. The shape of a prompt's attention then depends only on the
    prompt, and so do its bits on a CPU in float32.

    Args:
        model: on its device.
        prompts: tokens by prompt; a prompt of a single token has nothing to compute and is skipped.

    Yields:
        The prompts of a pass, and the keys and values of each layer, [prompts, heads, padded length, head size].
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
            position_ids=torch.arange(width, device=model.device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        layers: list[Any] = cache.layers
        yield members, [(layer.keys, layer.values) for layer in layers]
