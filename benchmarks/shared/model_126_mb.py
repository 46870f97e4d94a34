"""The model that weights are measured with on a CPU."""

from typing import Any

QWEN3_126_MB: dict[str, Any] = {
    "vocab_size": 63, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "eos_token_id": 1,
    "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
"""Configuration of a Qwen3 of 126 MB with the quickstart's vocabulary, for measuring weights on a CPU."""
