"""Small models with random weights, of several families; how weights are changed and compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import CriticModel

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16),
    "mistral": MistralConfig(**SIZES, head_dim=16, sliding_window=8),
    "phi3": Phi3Config(**SIZES),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16),
    "gpt2": GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=2, n_positions=64),
}
TOKENS = torch.randint(0, 48, (2, 20), generator=torch.Generator().manual_seed(0))


def random_model(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def settings_of(folder: Path | str, **fields: Any) -> ModelSettings:
    return ModelSettings(source=str(folder), **{"dtype": "float32", **fields})


def version(uri: Path | str, number: int = 0, adapter: Path | str | None = None) -> WeightsReference:
    return WeightsReference(version=number, uri=str(uri), adapter=str(adapter) if adapter else None)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def nudge(model: torch.nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Change weights as learning would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if wanted(name):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def of_adapter(name: str) -> bool:
    return "lora_" in name


@pytest.fixture
def tiny(tiny_model: Path) -> ModelSettings:
    return settings_of(tiny_model)


def token_values(critic: CriticModel, ids: torch.Tensor) -> torch.Tensor:
    """A critic's values in the plain way: the body, then the head."""
    values: torch.Tensor = critic.score(critic.body(input_ids=ids, use_cache=False).last_hidden_state.float())
    return values.squeeze(-1)
