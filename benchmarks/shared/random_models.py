"""Models with random weights, for benchmarks that need no trained one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.shared.places import QUICKSTART

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QWEN3_126_MB: dict[str, Any] = {
    "vocab_size": 63, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "eos_token_id": 1,
    "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
"""Configuration of a Qwen3 of 126 MB with the quickstart's vocabulary, for measuring weights on a CPU."""


def random_qwen3(seed: int = 0, configuration: dict[str, Any] = QWEN3_126_MB) -> PreTrainedModel:
    """Return a Qwen3 whose weights depend on the seed alone."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**configuration))


def publish_model(folder: Path, model: PreTrainedModel) -> None:
    """Publish a model with the quickstart's tokenizer, as the learner does."""
    from transformers import AutoTokenizer

    from rlhfless_functions.weights import publish_weights

    publish_weights(str(folder), model, AutoTokenizer.from_pretrained(QUICKSTART / "model"))


def save_small_tokenizer(folder: Path) -> None:
    """Save a tokenizer with two words, for a model that is only given tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
