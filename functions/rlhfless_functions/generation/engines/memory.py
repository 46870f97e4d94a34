"""The number of tokens whose keys and values fit into the free memory."""

import psutil
import torch
from transformers import PretrainedConfig

from rlhfless_functions.runtime.host_memory import CGROUP, container_free_bytes

_CPU_SHARE = 0.5
_GPU_SHARE = 0.8
"""Share of the free memory for the KV cache. The rest is for activations, and on a CPU for other processes."""


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token in all layers.

    Args:
        config: configuration of the model's text part.
        dtype: number format of the cache.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * dtype.itemsize)


def free_kv_tokens(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, held_bytes: int) -> int:
    """Return the number of tokens whose keys and values fit into the KV cache's share of the free memory.

    Args:
        config: configuration of the model's text part.
        dtype: number format of the cache.
        device: device of the cache.
        held_bytes: memory of an old cache that the new one replaces.
    """
    if device.type == "cuda":
        share, free = _GPU_SHARE, torch.cuda.mem_get_info(device)[0]
    else:
        share, free = _CPU_SHARE, min(psutil.virtual_memory().available, container_free_bytes(CGROUP))
    return max(1, int(share * (free + held_bytes)) // kv_bytes_per_token(config, dtype))
