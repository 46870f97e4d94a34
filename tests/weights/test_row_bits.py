"""Layers whose rows have the same bits in every batch."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from rlhfless_functions.weights.row_bits import EXPERTS, fix_single_outputs

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "head_dim": 32, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "sixteen experts": Qwen3MoeConfig(**SIZES, num_experts=16, moe_intermediate_size=64),
    "a whole layer each": MixtralConfig(**SIZES, num_local_experts=4),
    "transposed, with biases and a gate of its own": GptOssConfig(**SIZES, num_local_experts=8),
}


def experts_of(name: str, implementation: str = EXPERTS, dtype: torch.dtype = torch.float32) -> Any:
    """The experts of a random model's only layer."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    return model.model.layers[0].mlp.experts


def inputs(experts: Any, tokens: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, and two experts of each with their weights."""
    torch.manual_seed(1)
    chosen = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(tokens)])
    return torch.randn(tokens, SIZES["hidden_size"]), chosen, torch.rand(tokens, 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_does_not_depend_on_what_passes_with_it(name: str) -> None:
    experts = experts_of(name)
    rows = inputs(experts)
    with torch.no_grad():
        whole = experts(*rows)
        for first, last in ((0, 1), (0, 16), (5, 25), (1, 32)):
            assert torch.equal(experts(*(each[first:last] for each in rows)), whole[first:last])
        order = torch.randperm(32, generator=torch.Generator().manual_seed(2))
        assert torch.equal(experts(*(each[order] for each in rows)), whole[order])


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_and_gradients_are_those_of_transformers(name: str) -> None:
    found = []
    for implementation in (EXPERTS, "eager"):
        experts = experts_of(name, implementation)
        hidden, chosen, weights = inputs(experts)
        hidden.requires_grad_()
        weights.requires_grad_()
        output = experts(hidden, chosen, weights)
        learning = [hidden, weights, *experts.parameters()]
        found.append([output, *torch.autograd.grad(output.square().sum(), learning)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.detach().abs().max()))


def test_other_formats_are_computed_by_transformers() -> None:
    experts = experts_of("sixteen experts", dtype=torch.bfloat16)
    theirs = experts_of("sixteen experts", "grouped_mm", dtype=torch.bfloat16)
    hidden, chosen, weights = inputs(experts)
    rows = hidden.bfloat16(), chosen, weights.bfloat16()
    assert torch.equal(experts(*rows), theirs(*rows))


@pytest.mark.parametrize("bias", [True, False])
def test_a_row_of_a_single_output_does_not_depend_on_the_others(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(128, 1, bias=bias), nn.Linear(128, 2)])
    rows, plain = torch.randn(64, 128), copy.deepcopy(model[0])
    fix_single_outputs(model)
    whole = model[0](rows)
    for count in range(16, 64):
        assert torch.equal(model[0](rows[:count]), whole[:count])
        assert torch.equal(torch.sigmoid(model[0](rows[:count])), torch.sigmoid(whole)[:count])
    torch.testing.assert_close(whole, plain(rows))
    ours = torch.autograd.grad(whole.square().sum(), list(model[0].parameters()))
    theirs = torch.autograd.grad(plain(rows).square().sum(), list(plain.parameters()))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert type(model[1]) is nn.Linear


def test_so_does_one_with_an_adapter_and_one_of_zeros_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"gate": nn.Linear(128, 1, bias=False)})
    rows = torch.randn(64, 128)
    fix_single_outputs(model)
    plain = torch.sigmoid(model["gate"](rows))
    adapted = inject_adapter_in_model(LoraConfig(r=2, target_modules=["gate"]), model)
    fix_single_outputs(adapted)
    whole = torch.sigmoid(adapted["gate"](rows))
    assert torch.equal(whole, plain)
    nn.init.normal_(adapted["gate"].lora_B["default"].weight)
    whole = torch.sigmoid(adapted["gate"](rows))
    assert not torch.equal(whole, plain)
    for count in range(16, 64):
        assert torch.equal(torch.sigmoid(adapted["gate"](rows[:count])), whole[:count])
