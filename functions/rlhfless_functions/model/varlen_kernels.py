"""Kernels for attention over sequences of any lengths in one row: which one to use, and how to call it.

torch's own is `torch.nn.attention.varlen.varlen_attn` (torch 2.10 has it without scale and window); the other is
`flash_attn_varlen_func` of the flash-attn package, version 2. In both the last query of a sequence sees its last key,
and a window (left, right) counts the tokens beside the query's own one. Neither runs on a CPU.
"""

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

Kernel = Literal["torch", "flash_attn", "sdpa"]
"""torch's own varlen kernel, the flash-attn package's, or scaled dot-product attention of one sample at a time."""

_WIDEST_HEAD = 256
"""Largest head size of flash attention 2."""
_AMPERE = (8, 0)
"""Least compute capability of flash attention 2."""


@cache
def installed_kernels() -> frozenset[Kernel]:
    """Return the kernels for sequences of any lengths that are installed here."""
    found: set[Kernel] = set()
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None and torch.version.hip is None:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        if {"scale", "window_size"} <= inspect.signature(kernel).parameters.keys():
            found.add("torch")
    if importlib.util.find_spec("flash_attn") is not None:
        try:
            module = importlib.import_module("flash_attn")
        except ImportError:  # It was built for another version of torch.
            return frozenset(found)
        if hasattr(module, "flash_attn_varlen_func"):
            found.add("flash_attn")
    return frozenset(found)


def choose_kernel(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_sizes: tuple[int, int], installed: frozenset[Kernel]
) -> Kernel:
    """Return the kernel to use.

    Args:
        capability: CUDA compute capability of the device; None for any other device.
        dtype: number format of queries, keys and values.
        head_sizes: of the keys and of the values.
        installed: see `installed_kernels`.
    """
    if why_no_kernel(capability, dtype, head_sizes, installed) is not None:
        return "sdpa"
    return "torch" if "torch" in installed else "flash_attn"


def why_no_kernel(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_sizes: tuple[int, int], installed: frozenset[Kernel]
) -> str | None:
    """Return why no kernel for sequences of any lengths can be used, with the remedy; None if one can.

    The arguments are those of `choose_kernel`.
    """
    size, of_values = head_sizes
    if capability is None or capability < _AMPERE:
        return "the device is no GPU of compute capability 8.0 or more"
    if dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16, and this is {dtype}; set model.dtype to bfloat16"
    if size != of_values or size % 8 or size > _WIDEST_HEAD:
        return f"no kernel has heads of size {size} for keys and {of_values} for values"
    if not installed:
        return "torch's varlen_attn lacks `scale` or `window_size`, and flash-attn is not installed; install either"
    return None


@dataclass(frozen=True)
class Sequences:
    """The sequences of a row: they tell which queries and keys belong together."""

    bounds: torch.Tensor
    """[sequences + 1] int32: where each sequence's queries begin, and the end of the row."""
    key_bounds: torch.Tensor
    """[sequences + 1] int32: where each sequence's keys begin, and their end."""
    longest: int
    """Largest number of queries of a sequence."""
    most_keys: int
    """Largest number of keys of a sequence."""


def attend(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: Sequences,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Compute causal attention within each sequence, [tokens, heads, head size].

    Args:
        kernel: torch's or flash-attn's.
        query: [tokens, heads, head size], on a GPU, in bfloat16.
        key: [keys, key-value heads, head size], like `value`.
        sequences: of the row, on the same device.
        scaling: of the scores.
        window: how many tokens a token sees, itself included; None means all before it.
    """
    sizes = sequences.bounds, sequences.key_bounds, sequences.longest, sequences.most_keys
    seen = (-1 if window is None else window - 1, 0)
    output: torch.Tensor
    if kernel == "torch":
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        heads, options = query.shape[1] // key.shape[1], {}
        if "enable_gqa" in inspect.signature(function).parameters:
            options["enable_gqa"] = heads > 1
        elif heads > 1:
            key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
        output = function(query, key, value, *sizes, scale=scaling, window_size=seen, **options)
    else:
        output = importlib.import_module("flash_attn").flash_attn_varlen_func(
            query, key, value, *sizes, softmax_scale=scaling, causal=True, window_size=seen, deterministic=True
        )
    return output


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the CUDA compute capability of a device; None for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
