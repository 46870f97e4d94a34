"""Attention over samples in one row without padding. Each sample sees only itself.

A packed row has no padding to compute, and its attention needs no mask: a kernel for sequences of any lengths (flash
attention's "varlen" form) gets the beginning of each sample. Without such a kernel, the samples are computed one by
one. A sample may have more keys than queries: the keys of a shared prompt come before its own (`shared_prompts.py`).
"""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhfless_functions.model.attention_masks import KINDS, LayerMasks
from rlhfless_functions.model.packing import Packing, positions
from rlhfless_functions.model.varlen_kernels import (
    attend,
    capability_of,
    choose_kernel,
    installed_kernels,
    why_no_kernel,
)

PACKED = "rlhfless_packed"
"""Name of this attention among transformers' implementations."""

logger = logging.getLogger(__name__)
_able: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_TRIAL = ((3, 1, 4, 1, 5), (9, 2, 6))
"""Number of tokens in the trial of a model."""


@torch.compiler.disable  # Its loops depend on the samples' lengths: each length would be compiled again.
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each sample of a packed row. Other rows go to transformers' own attention.

    Args:
        module: a layer's attention, with its number as `layer_idx`.
        query: [1, heads, tokens, head size].
        key: [1, key-value heads, tokens, head size], like `value`.
        attention_mask: not used for a packed row.
        dropout: not used for a packed row.
        scaling: scale of the scores; by default 1 / √head size.
        sliding_window: number of tokens that a token sees, itself included; by default all before it.
        packing: positions of the samples, in a packed row.

    Returns:
        [1, tokens, heads, head size], and no attention weights.
    """
    if packing is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if packing.record is not None:
        packing.record.setdefault(layer, (key, value))  # Checkpointing computes a layer twice.
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    head_sizes = key.shape[-1], value.shape[-1]
    kernel = choose_kernel(capability_of(query.device), query.dtype, head_sizes, installed_kernels())
    if kernel == "sdpa":
        keys, values = packing.keys(layer, key, 0), packing.keys(layer, value, 1)
        queries = query.split(packing.lengths, dim=2)
        masks: dict[tuple[int, int], torch.Tensor | None] = {}
        outputs = [_attend(*each, scaling, sliding_window, masks) for each in zip(queries, keys, values, strict=True)]
        return torch.cat(outputs, dim=1), None
    rows = query[0].transpose(0, 1), packing.key_row(layer, key, 0), packing.key_row(layer, value, 1)
    return attend(kernel, *rows, packing.sequences(query.device), scaling, sliding_window)[None], None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    masks: dict[tuple[int, int], torch.Tensor | None],
) -> torch.Tensor:
    """Compute one sample's attention, [1, tokens, heads, value size]; its last query sees its last key."""
    shape = query.shape[2], key.shape[2]
    if shape not in masks:
        masks[shape] = _mask(*shape, window, query.device)
    mask = masks[shape]
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2)


def _mask(tokens: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return a bool mask [tokens, keys], True if a token sees a key; None for a plain causal mask."""
    before = keys - tokens
    if before == 0 and (window is None or keys <= window):
        return None
    visible = torch.ones(tokens, keys, dtype=torch.bool, device=device).tril_(before)
    return visible if window is None else visible.triu_(before - window + 1)


def can_pack(body: PreTrainedModel) -> bool:
    """Return whether this attention can replace a model's own without changing its numbers.

    The model's configuration tells its parts. One trial shows whether the attention gets all arguments that it needs.
    """
    if body not in _able:
        fits = _fits(body)
        _able[body] = fits and _try(body)
        if fits and not _able[body]:
            logger.warning("%s can't be packed, and its rows are padded: its numbers would differ", type(body).__name__)
    return _able[body]


def _fits(body: PreTrainedModel) -> bool:
    config = body.config
    text = config.get_text_config()
    return (
        config._attn_implementation == "sdpa"
        and config.is_encoder_decoder is False
        and body._supports_attention_backend
        and body._supports_flash_attn  # These models tell the kernel their window; others have it only in a mask.
        and LayerMasks.of(config).kinds <= KINDS
        and getattr(text, "attn_logit_softcapping", None) is None
    )


def _try(body: PreTrainedModel) -> bool:
    with torch.inference_mode():
        expected = [
            body(input_ids=torch.tensor([sample], device=body.device), use_cache=False).last_hidden_state
            for sample in _TRIAL
        ]
        use_packing(body, True)
        try:
            together = packed_hidden(body, torch.tensor([sum(_TRIAL, ())]), Packing([len(sample) for sample in _TRIAL]))
        except (RuntimeError, TypeError, ValueError):
            return False
        finally:
            use_packing(body, False)
    plain = torch.cat(expected, dim=1)
    tolerance = 1e-3 if body.dtype == torch.float32 else 0.05
    return torch.allclose(together, plain, rtol=tolerance, atol=tolerance * float(plain.abs().max()))


def is_packed(
    setting: Literal["auto", "always", "never"], body: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> bool:
    """Return whether to give a model packed rows. `auto` means yes if there is a kernel for sequences of any lengths.

    Without such a kernel, packing pays for some batches and costs for others: passes of samples of similar lengths have
    little padding, and long rows do not fit into a CPU's cache (`benchmarks/learner/results/learner_settings.json`).

    Args:
        setting: `learning.pack`.
        body: the transformer below the head.
        device: device of the computation.
        dtype: number format of the computation.
    """
    if setting == "never" or (setting == "auto" and device.type != "cuda"):
        return False
    if not can_pack(body):
        _say(f"{type(body).__name__} computes with padding, because its attention has no form for packed rows")
        return False
    text = body.config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    reason = why_no_kernel(capability_of(device), dtype, (size, size), installed_kernels())
    if reason is not None and device.type == "cuda":
        done = "one sample at a time" if setting == "always" else "with padding"
        _say(f"{type(body).__name__} computes {done}, because no kernel for packed rows fits: {reason}")
    return setting == "always" or reason is None


@cache
def _say(line: str) -> None:
    """Log a line once in a process."""
    logger.warning(line)


def use_packing(body: PreTrainedModel, packed: bool) -> None:
    """Make a model accept packed rows, or stop it from accepting them."""
    current = body.config._attn_implementation
    if packed != (current == PACKED):
        body.set_attn_implementation(PACKED if packed else "sdpa")


def packed_hidden(
    body: PreTrainedModel, input_ids: torch.Tensor, packing: Packing, first: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the final hidden states of a packed row, [1, tokens, H], with autograd.

    Args:
        body: of a model for which `use_packing` is on.
        input_ids: [1, tokens].
        packing: positions of the samples.
        first: see `positions`.
    """
    device = next(body.parameters()).device
    hidden: torch.Tensor = body(
        input_ids=input_ids.to(device),
        position_ids=positions(packing.lengths, first).to(device),
        attention_mask=_no_mask(body.config, device),
        packing=packing,
        use_cache=False,
    ).last_hidden_state
    return hidden


def _no_mask(config: PreTrainedConfig, device: torch.device) -> Any:
    """Keeps a model from making a mask, which would have a number for each pair of tokens of the row."""
    given = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    return dict.fromkeys(KINDS, given) if LayerMasks.of(config).slides_by_kind else given
