"""What the varlen kernels for GPUs compute, in plain arithmetic, behind their own signatures."""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from rlhfless_functions.model import packed_attention


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """torch's."""
    assert cu_seq_k is not None
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return _attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def older_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """torch's before it had grouped heads."""
    assert query.shape[1] == key.shape[1]
    return _attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn's."""
    assert dropout_p == 0
    assert deterministic
    window = (window_size[0], 0) if causal else window_size
    return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest: int,
    most_keys: int,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """Each sequence by itself; its last query is aligned with its last key."""
    assert bounds.dtype == key_bounds.dtype == torch.int32
    assert bounds.shape == key_bounds.shape
    assert (bounds[0], bounds[-1], key_bounds[0], key_bounds[-1]) == (0, len(query), 0, len(key))
    assert (int(bounds.diff().max()), int(key_bounds.diff().max())) == (longest, most_keys)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    outputs = []
    for (begin, end), (first, last) in zip(_pairs(bounds), _pairs(key_bounds), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key[first:last]) * scale
        place = torch.arange(end - begin)[:, None] + (last - first) - (end - begin)
        distance = place - torch.arange(last - first)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            hidden |= distance > window[0]
        if window[1] >= 0:
            hidden |= -distance > window[1]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[first:last]))
    return torch.cat(outputs)


def _pairs(bounds: torch.Tensor) -> list[tuple[int, int]]:
    places = bounds.tolist()
    return list(pairwise(places))


def install(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Have packed attention take a stand-in: for `torch`, `older torch` or `flash_attn`."""
    if kernel == "flash_attn":
        module = ModuleType("flash_attn")
        module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", module)
    else:
        function = varlen_attn if kernel == "torch" else older_varlen_attn
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
    monkeypatch.setattr(packed_attention, "choose_kernel", lambda *_: kernel.removeprefix("older "))
