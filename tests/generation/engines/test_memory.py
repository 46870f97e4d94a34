"""How much room the KV cache may take."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from rlhfless_functions.generation.engines.memory import container_free_bytes, free_kv_tokens, kv_bytes_per_token

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


@pytest.mark.parametrize(
    ("limit", "used", "free"), [("1000\n", "300\n", 700.0), ("1000", "1200", 0.0), ("max", "300", float("inf"))]
)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, used: str, free: float) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    assert container_free_bytes(tmp_path) == free


def test_without_a_control_group_there_is_no_limit(tmp_path: Path) -> None:
    assert container_free_bytes(tmp_path) == float("inf")
