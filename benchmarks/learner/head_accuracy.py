"""How far the output head's numbers are from float64: with float32 products, with bfloat16, and as TRL and verl do it.

    python benchmarks/learner/head_accuracy.py

prints the table of docs/research/correctness.md. No GPU is needed: bfloat16 factors are multiplied in float32, which is
exact, and sums are in float32 as on a GPU. TRL and verl round the logits to bfloat16, and the gradient of the logits,
and compute the softmax in float32. All start from the same float32 weights and hidden states.
"""

import argparse
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhfless_functions.model import output_head
from rlhfless_functions.model.output_head import token_log_probs

Numbers = tuple[torch.Tensor, torch.Tensor]
"""Log-probabilities and entropies of tokens."""
SIZES = {"32k": (32_000, 1024), "128k": (128_256, 1024), "152k": (151_936, 1536)}
"""Vocabulary and hidden size."""
TOKENS = 64
QUANTITIES = ("log π, mean", "log π, largest", "entropy, mean", "gradient of states", "gradient of weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help="some of " + ", ".join(SIZES))
    sizes = parser.parse_args().sizes.split(",")
    print("| Vocabulary | Products | " + " | ".join(QUANTITIES) + " |")
    print("|---" * (2 + len(QUANTITIES)) + "|")
    for size in sizes:
        for way, found in errors(*SIZES[size]).items():
            print(f"| {size} | {way} | " + " | ".join(f"{found[quantity]:.0e}" for quantity in QUANTITIES) + " |")


def errors(vocabulary: int, width: int, tokens: int = TOKENS) -> dict[str, dict[str, float]]:
    """Return the errors of each way, in nats; of gradients relative to their norm.

    The logits are as wide as a trained model's: their standard deviation is 3, and the sampled token's is among the
    largest for three quarters of the tokens, and any for the rest.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator) * 0.02
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    hidden = torch.randn(tokens, width, generator=generator) * (3 / (0.02 * width**0.5))
    likely = ids[: tokens * 3 // 4]
    hidden[: len(likely)] += weight[likely] * (12 / (0.02**2 * width))
    factors = torch.randn(tokens, generator=generator)
    exact = _measured(lambda h, w: _by_softmax(h.double() @ w.double().T, ids), hidden, weight, factors)
    ways = {
        "float32": lambda h, w: _ours(h, w, ids, narrow=False),
        "bfloat16, ours on a GPU": lambda h, w: _ours(h, w, ids, narrow=True),
        "bfloat16, as TRL and verl": lambda h, w: _by_softmax(_RoundedLogits.apply(h, w), ids),
    }
    return {name: _compared(_measured(way, hidden, weight, factors), exact) for name, way in ways.items()}


class _RoundedLogits(torch.autograd.Function):
    """A bfloat16 linear layer's logits, as float32 numbers."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return _rounded(_rounded(hidden) @ _rounded(weight).T)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> Numbers:
        hidden, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        outward = _rounded(gradients[0])
        return _rounded(outward @ _rounded(weight)), _rounded(outward.T @ _rounded(hidden))


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


def _ours(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *, narrow: bool) -> Numbers:
    with torch.device("meta"):
        config = Qwen3Config(vocab_size=len(weight), hidden_size=len(weight[0]), num_hidden_layers=0)
        model = Qwen3ForCausalLM(config)
    del model.lm_head.weight
    model.lm_head.weight = weight  # with its autograd
    with patch.object(output_head, "multiplies_narrow", lambda hidden: narrow):
        log_probs, entropies = token_log_probs(model, hidden, ids, 1.0, entropy=True, entropy_gradient=True)
    assert entropies is not None
    return log_probs, entropies


def _by_softmax(logits: torch.Tensor, ids: torch.Tensor) -> Numbers:
    every = torch.log_softmax(logits, dim=-1)
    return every.gather(1, ids[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


def _measured(
    way: Callable[[torch.Tensor, torch.Tensor], Numbers],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    factors: torch.Tensor,
) -> dict[str, torch.Tensor]:
    hidden, parameter = hidden.clone().requires_grad_(), nn.Parameter(weight)
    log_probs, entropies = way(hidden, parameter)
    loss = (log_probs * factors).sum() + 0.1 * entropies.sum()
    of_hidden, of_weight = torch.autograd.grad(loss, [hidden, parameter])
    return {
        "log π": log_probs.detach(),
        "entropy": entropies.detach(),
        "gradient of states": of_hidden,
        "gradient of weights": of_weight,
    }


def _compared(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    away = {name: (numbers.double() - exact[name].double()).abs() for name, numbers in found.items()}
    return {
        "log π, mean": float(away["log π"].mean()),
        "log π, largest": float(away["log π"].max()),
        "entropy, mean": float(away["entropy"].mean()),
        **{name: float(away[name].norm() / exact[name].double().norm()) for name in QUANTITIES[3:]},
    }


if __name__ == "__main__":
    main()
