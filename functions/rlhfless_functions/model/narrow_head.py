"""The linear head with products of bfloat16 numbers: sums, logits and everything after them stay in float32.

A GPU multiplies bfloat16 about fifteen times as fast as float32. The product of two bfloat16 numbers is exact in
float32, so only the factors are rounded: the head's weights become those that are published, with which the sampler
computes, and logits are never rounded. TRL and verl round them as well (`benchmarks/learner/head_accuracy.py`).

The forward pass holds the logits of some tokens at once, over the whole vocabulary. The backward pass holds the logits
of all tokens over a part of the vocabulary. The part's rows of the weight's gradient are then complete, and are written
once: a chunk of tokens would read and write the gradient of the whole vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch

from rlhfless_functions.model.logit_form import LogitForm

_SHARE_OF_MEMORY = 1 / 64
"""Share of a GPU's memory for a chunk of logits, of which two or three exist at a time."""


def chunk_logits(device: torch.device) -> int | None:
    """Return how many float32 logits to hold at once by a GPU's whole memory; None on a CPU.

    What is free at the moment does not count: a repeated pass must have the same bits.
    """
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory * _SHARE_OF_MEMORY) // 4


class NarrowTokenLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies of tokens, float32 [tokens], from products of bfloat16 numbers."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        form: LogitForm,
        temperature: float,
        logits: int,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute them for a chunk of tokens at a time; `logits` is how many a chunk has."""
        log_probs = hidden.new_empty(len(ids), dtype=torch.float32)
        normalizers = torch.empty_like(log_probs)
        entropies = torch.empty_like(log_probs) if entropy else None
        narrow, columns = hidden.to(torch.bfloat16), weight.to(torch.bfloat16).T
        for rows in _chunks(len(ids), logits // len(weight)):
            scores = form.scores(_product(narrow[rows], columns, bias), temperature)
            torch.logsumexp(scores, dim=-1, out=normalizers[rows])
            every = scores.sub_(normalizers[rows, None])
            torch.gather(every, 1, ids[rows, None], out=log_probs[rows, None])
            if entropies is not None:
                # Autocast would round the factors of a dot product to bfloat16.
                entropies[rows] = -every.exp().mul_(every).sum(-1)
        ctx.save_for_backward(narrow, weight, bias, ids, normalizers, entropies)
        ctx.form, ctx.temperature, ctx.logits, ctx.format = form, temperature, logits, hidden.dtype
        ctx.entropy_gradient = entropy and entropy_gradient
        if entropies is not None and not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Compute the gradients for a chunk of the vocabulary at a time."""
        hidden, weight, bias, ids, normalizers, entropies = ctx.saved_tensors
        of_log_probs, of_entropies = gradients
        assert of_log_probs is not None
        to_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        to_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _chunks(len(weight), ctx.logits // max(1, len(ids))):
            some = weight[part].to(torch.bfloat16)
            scores = ctx.form.scores(_product(hidden, some.T, None if bias is None else bias[part]), ctx.temperature)
            slope = ctx.form.slope(scores, ctx.temperature)
            every = scores.sub_(normalizers[:, None])
            # d log p_y / d z = 1_y − p, and d H / d z = −p (log p + H)
            probabilities = every.exp()
            if ctx.entropy_gradient and of_entropies is not None:
                outward = every.add_(entropies[:, None]).mul_(of_entropies[:, None]).add_(of_log_probs[:, None])
                outward.mul_(probabilities).neg_()
            else:
                outward = probabilities.mul_(-of_log_probs[:, None])
            places = ids - part.start
            inside = (places >= 0) & (places < len(some))
            outward.scatter_add_(1, places.clamp(0, len(some) - 1)[:, None], (of_log_probs * inside)[:, None])
            outward = ctx.form.to_products(outward, slope, ctx.temperature)
            if to_bias is not None:
                to_bias[part] = outward.sum(0)
            narrow = outward.to(torch.bfloat16)
            if to_hidden is not None:
                to_hidden += _product(narrow, some)
            if to_weight is not None:
                to_weight[part] = _product(narrow.T, hidden)
        return None if to_hidden is None else to_hidden.to(ctx.format), to_weight, to_bias, *[None] * 6


def _chunks(length: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at least one and at most `size` places."""
    size = max(1, size)
    return (slice(start, min(length, start + size)) for start in range(0, length, size))


def _product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply bfloat16 matrices with sums in float32, which are not rounded. A CPU computes it in float32 as a whole:
    the same up to the order of the sums."""
    if left.device.type != "cpu":
        product = torch.mm(left, right, out_dtype=torch.float32)
    else:
        with torch.autocast("cpu", enabled=False):
            product = left.float() @ right.float()
    return product if bias is None else product.add_(bias.float())
