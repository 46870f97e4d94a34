"""Tiny random models of the families that people have, as they have them: for the tests of all that loads a model."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

TOKENS = 64
"""Of the tokenizer; the embeddings have a few rows more, as most published models do."""
WINDOW = 8
"""Sliding windows are shorter than the sequences here. Otherwise they would not matter."""
SIZES: dict[str, Any] = {  # Heads of 32: the least that vLLM has on a CPU.
    "vocab_size": TOKENS + 8,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
GEMMA_SIZES = {**SIZES, "hidden_size": 32, "initializer_range": 0.3, "head_dim": 32}
"""A wider one, whose embeddings are multiplied by the root of its width, would say its last token again and again."""
GEMMA: dict[str, Any] = {**GEMMA_SIZES, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 1e4}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen2.5, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2.5, untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3, experts": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32
    ),
    "qwen1.5, experts, window 0 that no layer uses": Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "qwen2.5, window that no layer uses": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "llama 3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "gemma": GemmaConfig(**GEMMA_SIZES),
    "gemma 2, no cap on attention": Gemma2Config(**GEMMA, attn_logit_softcapping=None, final_logit_softcapping=2.0),
    "gemma 3": Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"]),
    "mistral": MistralConfig(**SIZES, head_dim=32, sliding_window=WINDOW),
    "phi 2": PhiConfig(**SIZES),
    "phi 3": Phi3Config(**SIZES),
    "phi 4, longrope": Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=64),
}
EVERY: dict[str, PreTrainedConfig] = {
    **FAMILIES,
    # Its configuration denies that it is a decoder.
    "pythia": GPTNeoXConfig(**{**SIZES, "num_key_value_heads": 4}, is_decoder=False),
}
"""With what need not be tried with drafts."""
CAPPED = Gemma2Config(**GEMMA, attn_logit_softcapping=0.5)

TEMPLATE = (
    "{% for message in messages %}#{{ message['content'] }};{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def save(config: PreTrainedConfig, folder: Path, tokenizer_from: Path, shard: str = "30KB") -> Path:
    """As a user has it: shards, tokenizer, chat template."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=shard)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
