"""Random models whose layers are looked at one by one."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, PreTrainedModel, Qwen3Config

from tests.model.families import FAMILIES, SIZES

torch.set_num_threads(1)

ALL: dict[str, PreTrainedConfig] = {
    **FAMILIES,
    "gpt 2": GPT2Config(vocab_size=72, n_embd=128, n_layer=2, n_head=4, n_positions=128, initializer_range=0.15),
}


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


def deep(layers: int = 4) -> PreTrainedConfig:
    return Qwen3Config(**{**SIZES, "num_hidden_layers": layers}, head_dim=32, tie_word_embeddings=True)


def idle_behind(model: Any, layer: int) -> Any:
    """The layers behind this one add nothing to what they are given."""
    with torch.no_grad():
        for each in model.model.layers[layer:]:
            each.self_attn.o_proj.weight.zero_()
            each.mlp.down_proj.weight.zero_()
    return model
