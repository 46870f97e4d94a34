"""Floating-point operations that a training step needs, by the convention of model FLOPs utilisation (MFU).

PaLM (arXiv 2204.02311, appendix B) counts, for each token, 6 operations for each parameter that it is multiplied with
(2 forward, 4 backward) and 12 · layers · hidden · context for attention. Here:

    all weights    6 · parameters · tokens                       + 12 · layers · hidden · pairs
    an adapter     (4 · frozen + 6 · adapter) · tokens           + 12 · layers · hidden · pairs

- A frozen parameter has no gradient of its own: 2 operations forward, and 2 to pass the gradient on.
- `pairs` are a token and one that it sees, itself included. Attention is causal, so a sequence of n tokens has
  n · (n + 1) / 2 of them: half of n tokens with a context of n each.
- An embedding is looked up, not multiplied with. The output layer counts for tokens that have logits, which those of
  responses do alone; counted for all, the utilisation would come out higher.
- What is computed again (activation checkpointing, logits in chunks) does not count, and a prompt that is computed once
  for its group counts once. So this is what the learner makes of the hardware, not what sharing prompts saves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Parameters:
    """How many numbers tokens are multiplied with, and how attention is cut."""

    body: int
    """Below the output layer, without embedding and adapter."""
    head: int
    """Of the output layer."""
    adapter: int
    """0 where all weights are trained; otherwise body and head are frozen."""
    layers: int
    width: int
    """Heads times head size."""

    @property
    def flops_of_pair(self) -> int:
        """Attention's, forward and backward, for a token and one that it sees."""
        return 12 * self.layers * self.width


@dataclass(frozen=True)
class Passed:
    """What goes through a model once, forward and backward."""

    tokens: int
    logits: int
    """Tokens that logits are computed for."""
    pairs: int
    """Of a token and one that it sees."""


def count_parameters(model: "PreTrainedModel | PeftModel") -> Parameters:
    """Of a decoder with or without an adapter of peft's."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    outside = {id(base.get_input_embeddings().weight), id(base.get_output_embeddings().weight)}
    named = dict(model.named_parameters())
    adapter = sum(parameter.numel() for name, parameter in named.items() if "lora_" in name)
    body = sum(p.numel() for name, p in named.items() if id(p) not in outside and "lora_" not in name)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Parameters(
        body=body,
        head=base.get_output_embeddings().weight.numel(),
        adapter=adapter,
        layers=config.num_hidden_layers,
        width=config.num_attention_heads * size,
    )


def passed(groups: Iterable[tuple[int, Sequence[int]]], *, share_prompts: bool) -> Passed:
    """What a batch passes through the model.

    Args:
        groups: tokens of a prompt, and of each response to it.
        share_prompts: whether a group's prompt is passed once, or with each response.
    """
    tokens = logits = pairs = 0
    for prompt, responses in groups:
        prompts = 1 if share_prompts else len(responses)
        tokens += prompts * prompt + sum(responses)
        logits += sum(responses)
        pairs += prompts * _pairs(prompt) + sum(_pairs(prompt + each) - _pairs(prompt) for each in responses)
    return Passed(tokens, logits, pairs)


def training_flops(parameters: Parameters, work: Passed) -> int:
    """Of a forward and a backward pass."""
    multiplied = parameters.body * work.tokens + parameters.head * work.logits
    weights = 4 * multiplied + 6 * parameters.adapter * work.tokens if parameters.adapter else 6 * multiplied
    return weights + parameters.flops_of_pair * work.pairs


def _pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2
