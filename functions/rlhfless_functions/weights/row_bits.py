"""Layers whose rows would have other bits in another batch, computed so that they have the same.

On a CPU a row of a float32 product does not depend on the other rows if there are at least 16, and two columns. The
engine pads its passes to as many. Two kinds of layers need more:

- An expert of a mixture gets fewer rows than its pass has, and another number in every batch. Its rows are padded here,
  in an experts implementation of transformers.
- A layer with a single output (the gate of a shared expert, an adapter of rank 1) is a product with a vector, whose
  sums depend on the number of rows. It gets a second column here. What the model computes of one column, such as a
  sigmoid, is computed by vectors of 16 or 32 numbers and a remainder that rounds otherwise, unless the column is
  strided: then all of it is computed as the remainder is.
"""

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

EXPERTS = "padded"
"""Name of this implementation in transformers' configurations."""
_ROWS = 16
"""Rows that a product on a CPU computes alike; the engine pads its passes to as many."""


def padded_experts_forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute a layer's experts. The bits of a row depend neither on the other rows nor on their experts.

    That holds in float32 on a CPU, with one thread. Elsewhere transformers' own implementation computes: its kernels
    choose their order of sums by shape, and padding would only cost time.

    Args:
        experts: a module that transformers' `use_experts_implementation` decorates.
        hidden: [tokens, H].
        chosen: [tokens, k] the experts of each token.
        weights: [tokens, k] their weights.

    Returns:
        [tokens, H], in the format of `hidden`.
    """
    if not _has_fixed_bits(hidden, experts.down_proj):
        return grouped_mm_experts_forward(experts, hidden, chosen, weights)
    tokens, k = chosen.shape
    counts = torch.bincount(chosen.flatten(), minlength=experts.num_experts)
    widths = (counts + _ROWS - 1) // _ROWS * _ROWS
    expert_of, order = torch.sort(chosen.flatten(), stable=True)
    within = torch.arange(tokens * k) - (counts.cumsum(0) - counts)[expert_of]
    slots = torch.empty_like(order)
    slots[order] = (widths.cumsum(0) - widths)[expert_of] + within
    rows = hidden.new_zeros(int(widths.sum()), hidden.shape[1])
    rows = rows.index_copy(0, slots, hidden[:, None].expand(-1, k, -1).reshape(tokens * k, -1))
    products = _every_expert(experts, rows, widths.tolist())[slots].view(tokens, k, -1) * weights[..., None]
    # In the order of k, because a reduction's order may depend on the shape.
    total = products[:, 0]
    for choice in range(1, k):
        total = total + products[:, choice]
    return total.to(hidden.dtype)


class _SingleOutput(nn.Linear):
    """A linear layer with one output, the bits of whose rows do not depend on the other rows."""

    def forward(self, input: Tensor) -> Tensor:
        if not _has_fixed_bits(input, self.weight):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.expand(2)
        return functional.linear(input, self.weight.expand(2, -1), bias)[..., :1]


def fix_single_outputs(model: nn.Module) -> None:
    """Let a model's linear layers with one output compute so, in place; also those that an adapter is added to."""
    for module in model.modules():
        if type(module) is nn.Linear and module.out_features == 1:
            module.__class__ = _SingleOutput
        elif isinstance(module, LoraLayer) and module.out_features == 1:
            module.register_forward_hook(_strided)


def _strided(layer: nn.Module, inputs: tuple[Any, ...], column: Tensor) -> Tensor | None:
    """Return the column of an adapted layer as `_SingleOutput` returns that of a plain one."""
    return functional.pad(column, (0, 1))[..., :1] if _has_fixed_bits(column, column) else None


def _has_fixed_bits(rows: Tensor, weight: Tensor) -> bool:
    """Return whether a product's kernel is one whose rows can be computed alike."""
    plain = rows.dtype == weight.dtype == torch.float32 and rows.device.type == "cpu"
    return plain and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()


def _every_expert(experts: Any, rows: Tensor, widths: list[int]) -> Tensor:
    """Return the output of each expert for its rows, which lie one expert's after the other's."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    ins, outs = _products(experts, first), _products(experts, "down_proj")
    outputs = []
    for part, (into, its_bias), (out_of, last_bias) in zip(rows.split(widths), ins, outs, strict=True):
        if len(part):
            inner = functional.linear(part, into, its_bias)
            inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
            outputs.append(functional.linear(inner, out_of, last_bias))
    return torch.cat(outputs)


def _products(experts: Any, name: str) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of each expert, as `linear` takes them."""
    matrices: Tensor = getattr(experts, name)
    if experts.is_transposed:
        matrices = matrices.transpose(1, 2)
    biases: tuple[Tensor | None, ...] = (None,) * len(matrices)
    if experts.has_bias:
        biases = getattr(experts, f"{name}_bias").unbind()
    # Taken apart at once: the gradient of a single index would be as large as all experts.
    return list(zip(matrices.unbind(), biases, strict=True))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, padded_experts_forward)
