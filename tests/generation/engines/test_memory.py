"""How much room the KV cache may take."""

import torch
from transformers import Qwen3Config

from rlhfless_functions.generation.engines.memory import free_kv_tokens, kv_bytes_per_token

CONFIG = Qwen3Config(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=10
)


def test_a_token_takes_keys_and_values_of_all_layers() -> None:
    assert kv_bytes_per_token(CONFIG, torch.float32) == 2 * 3 * 2 * 32 * 4
    assert kv_bytes_per_token(CONFIG, torch.bfloat16) == 2 * 3 * 2 * 32 * 2


def test_memory_of_a_cache_that_is_replaced_counts_as_free() -> None:
    cpu = torch.device("cpu")
    without = free_kv_tokens(CONFIG, torch.float32, cpu, held_bytes=0)
    huge = 2**60
    assert free_kv_tokens(CONFIG, torch.float32, cpu, held_bytes=huge) > without > 0
