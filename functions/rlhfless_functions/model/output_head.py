"""From final hidden states to log-probabilities of tokens: the language-model head, a chunk of logits at a time.

Logits, softmax and all sums are in float32. The products are in float32 as well; a GPU that computes in bfloat16 rounds
their factors (`narrow_head.py`).

Logits are by far the largest tensor of a forward pass: 4,096 tokens over a vocabulary of 150,000 are 2.5 GB, and
autograd would keep three such tensors. Here only a chunk of them exists at a time, and the backward pass computes them
again from the hidden states. This takes one more matrix product. On a CPU it was no slower than reading them back.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhfless_functions.model.logit_form import LogitForm
from rlhfless_functions.model.narrow_head import NarrowTokenLogProbs, chunk_logits

CHUNK_LOGITS = 2**24
"""Default number of logits in a chunk (64 MiB for each of the two or three tensors of a chunk)."""
LEAST_CHUNK_TOKENS = 128
"""With fewer rows than this, a matrix product waits for the head's weights."""


def token_log_probs(
    model: nn.Module,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities of tokens under the softmax of the head's logits over a temperature, with autograd.

    Args:
        model: a causal language model of transformers, with or without a peft adapter.
        hidden: [tokens, H] final hidden states.
        ids: [tokens] the token that each state predicts.
        temperature: divides the float32 logits; above 0.
        entropy: whether to return the distributions' entropy as well.
        entropy_gradient: whether gradients flow through it.
        chunk_tokens: tokens whose logits are held at once; by default from the vocabulary's size.

    Returns:
        Log-probabilities and entropies in nats, float32 [tokens].
    """
    causal = causal_model(model)
    head, form = causal.get_output_embeddings(), LogitForm.of(causal)
    vocabulary = causal.config.get_text_config().vocab_size
    if type(head) is nn.Linear and multiplies_narrow(hidden):
        logits = chunk_tokens * vocabulary if chunk_tokens else chunk_logits(hidden.device) or CHUNK_LOGITS
        log_probs, entropies = NarrowTokenLogProbs.apply(
            hidden, head.weight, head.bias, ids, form, temperature, logits, entropy, entropy_gradient
        )
        return log_probs, entropies
    chunk_tokens = chunk_tokens or max(LEAST_CHUNK_TOKENS, CHUNK_LOGITS // vocabulary)
    if type(head) is nn.Linear:
        log_probs, entropies = _TokenLogProbs.apply(
            hidden, head.weight, head.bias, ids, form, temperature, chunk_tokens, entropy, entropy_gradient
        )
        return log_probs, entropies

    def of_chunk(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        every = torch.log_softmax(output_logits(model, rows) / temperature, dim=-1)
        chosen = every.gather(-1, targets[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            return chosen, _entropy(every) if entropy else None

    # The head has an adapter. Let the head's own module compute.
    keep = torch.is_grad_enabled()
    chunks = [
        checkpoint(of_chunk, rows, targets, use_reentrant=False) if keep else of_chunk(rows, targets)
        for rows, targets in zip(hidden.split(chunk_tokens), ids.split(chunk_tokens), strict=True)
    ]
    entropies = torch.cat([entropies for _, entropies in chunks]) if entropy else None
    return torch.cat([log_probs for log_probs, _ in chunks]), entropies


def multiplies_narrow(hidden: torch.Tensor) -> bool:
    """Return whether the head multiplies bfloat16 numbers: on a GPU, if the model computes in bfloat16 there."""
    kind = hidden.device.type
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return kind == "cuda" and (cast or hidden.dtype == torch.bfloat16)


def output_logits(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Apply the language-model head in float32: final hidden states [..., H] to logits [..., V].

    Weights in a narrower format are widened; the products are exact and the sums are in float32.
    """
    causal = causal_model(model)
    head = causal.get_output_embeddings()
    with torch.autocast(hidden.device.type, enabled=False):
        if type(head) is nn.Linear:
            bias = None if head.bias is None else head.bias.float()
            logits = functional.linear(hidden.float(), head.weight.float(), bias)
        else:
            logits = head(hidden.to(head.weight.dtype)).float()
    return _formed(causal, logits)


def sampled_logits(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits as generation computes them: the head in the model's own number format, and float32 afterwards."""
    causal = causal_model(model)
    return _formed(causal, causal.get_output_embeddings()(hidden).float())


def _formed(causal: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    form = LogitForm.of(causal)
    logits = logits * form.scale
    return logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)


@torch.no_grad()
def check_output_logits(model: nn.Module) -> None:
    """Check that `output_logits` computes the same as the model after its last layer.

    Raises:
        ValueError: for an architecture that changes its logits in an unsupported way.
    """
    causal = causal_model(model)
    # From all over the vocabulary: the embedding of a padding token may be zero, and then all of its logits are.
    vocabulary = causal.config.get_text_config().vocab_size
    ids = torch.linspace(0, vocabulary - 1, 8, device=causal.device).long()[None]
    ours = output_logits(model, causal.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    theirs = causal(input_ids=ids, use_cache=False).logits.float()
    tolerance = 1e-3 if causal.dtype == torch.float32 else 0.05
    if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())):
        raise ValueError(
            f"{type(causal).__name__} changes its logits after the head in an unsupported way;"
            " use a model of another architecture"
        )


def causal_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model itself; adapters are layers inside it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _TokenLogProbs(torch.autograd.Function):
    """Linear head, soft-cap, temperature, log-softmax and entropy in one function, one chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        form: LogitForm,
        temperature: float,
        chunk_tokens: int,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_probs = hidden.new_empty(len(ids), dtype=torch.float32)
        entropies = torch.empty_like(log_probs) if entropy else None
        with torch.autocast(hidden.device.type, enabled=False):
            wide, wide_bias = weight.float(), None if bias is None else bias.float()
            for start in range(0, len(ids), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                scores = _scores(hidden[rows], wide, wide_bias, form, temperature)
                every = torch.log_softmax(scores, dim=-1)
                del scores
                torch.gather(every, 1, ids[rows, None], out=log_probs[rows, None])
                if entropies is not None:
                    entropies[rows] = _entropy(every)
        ctx.save_for_backward(hidden, weight, bias, ids, entropies)
        ctx.form, ctx.temperature, ctx.chunk_tokens = form, temperature, chunk_tokens
        ctx.entropy_gradient = entropy and entropy_gradient
        if entropies is not None and not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, ids, entropies = ctx.saved_tensors
        of_log_probs, of_entropies = gradients
        assert of_log_probs is not None
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight: torch.Tensor | None = None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            wide, wide_bias = weight.float(), None if bias is None else bias.float()
            for start in range(0, len(ids), ctx.chunk_tokens):
                rows = slice(start, start + ctx.chunk_tokens)
                inputs = hidden[rows].float()
                scores = _scores(inputs, wide, wide_bias, ctx.form, ctx.temperature)
                every = torch.log_softmax(scores, dim=-1)
                slope = ctx.form.slope(scores, ctx.temperature)
                del scores
                # d log p_y / d z = 1_y − p, and d H / d z = −p (log p + H)
                probabilities = every.exp()
                if ctx.entropy_gradient and of_entropies is not None:
                    outward = every + entropies[rows, None]
                    outward.mul_(of_entropies[rows, None]).add_(of_log_probs[rows, None])
                    outward.mul_(probabilities).neg_()
                else:
                    outward = probabilities.mul_(-of_log_probs[rows, None])
                outward.scatter_add_(1, ids[rows, None], of_log_probs[rows, None])
                outward = ctx.form.to_products(outward, slope, ctx.temperature)
                if to_hidden is not None:
                    to_hidden[rows] = outward @ wide
                if ctx.needs_input_grad[1]:
                    if to_weight is None:
                        to_weight = outward.T @ inputs
                    else:
                        to_weight.addmm_(outward.T, inputs)
                if to_bias is not None:
                    to_bias += outward.sum(0)
        if to_weight is None and ctx.needs_input_grad[1]:
            to_weight = torch.zeros_like(weight)
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *[None] * 6,
        )


def _scores(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: LogitForm, temperature: float
) -> torch.Tensor:
    """Return logits divided by the temperature, float32 [tokens, V], in memory of their own."""
    return form.scores(functional.linear(hidden.float(), weight, bias), temperature)


def _entropy(log_probs: torch.Tensor) -> torch.Tensor:
    return -torch.linalg.vecdot(log_probs.exp(), log_probs)
