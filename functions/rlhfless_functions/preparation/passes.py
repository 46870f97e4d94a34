"""The numbers that a model gives for each response token of samples, in forward passes that never mix groups."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhfless_functions.api import PrepareRequest
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.model.forward import RaggedBatch, body_of, response_log_probs, response_values
from rlhfless_functions.model.micro_batches import Block, collate_run, plan_micro_batches
from rlhfless_functions.model.packed_attention import is_packed, use_packing
from rlhfless_functions.model.shared_prompts import ResponseBatch, SharedPrompts, can_share_prompts

CPU_PASS_TOKENS = 2048
"""Most tokens of one forward pass on a CPU. Beyond it the activations leave the cache, and each token takes longer."""

_Compute = Callable[[RaggedBatch | ResponseBatch, SharedPrompts | None], torch.Tensor]
"""Computes a model's numbers for response tokens [n, R]."""


@dataclass(frozen=True)
class ForwardPasses:
    """Passes of several models over the same samples.

    A micro-batch never mixes groups. Otherwise its shape, and with it the last bits of a group's numbers, would depend
    on the groups that happened to be complete when the chunk was sent.
    """

    request: PrepareRequest
    samples: Sequence[GeneratedSample]
    """Samples; those of a prompt are adjacent."""
    pad: int
    """Token id of the padding."""
    device: torch.device
    check: Callable[[], None]
    """Called before every pass; raises an error to stop."""

    def log_probs(self, model: nn.Module) -> list[list[float]]:
        """Return the log-probabilities of each sample's response tokens at the sampling temperature."""
        temperature = self.request.sampling.temperature
        return self._ask(
            model, lambda batch, prompts: response_log_probs(model, batch, temperature, prompts=prompts)[0]
        )

    def values(self, critic: nn.Module) -> list[list[float]]:
        """Return a critic's values at each sample's response tokens."""
        return self._ask(critic, lambda batch, prompts: response_values(critic, batch, prompts))

    def _ask(self, model: nn.Module, compute: _Compute) -> list[list[float]]:
        request, body = self.request, body_of(model)
        budget = min(request.microbatch_tokens, CPU_PASS_TOKENS if self.device.type == "cpu" else sys.maxsize)
        packed = is_packed(request.pack, body, self.device, body.dtype)
        use_packing(body, packed)
        share = request.share_prompts and can_share_prompts(body)
        answers: list[list[float]] = [[] for _ in self.samples]
        for _, numbered in groupby(enumerate(self.samples), key=lambda pair: pair[1].prompt):
            group = [row for row, _ in numbered]
            for block in plan_micro_batches(self.samples, group, budget, share=share, packed=packed):
                shared = self._share(body, block, packed) if block.prompts else None
                for rows in block.runs:
                    self.check()
                    batch = collate_run(self.samples, block, rows, self.pad, packed=packed)
                    with torch.inference_mode():
                        numbers = compute(batch.to(self.device), shared).cpu().tolist()
                    for row, line in zip(rows, numbers, strict=True):
                        answers[row] = line[: len(self.samples[row].response_tokens)]
        return answers

    def _share(self, body: PreTrainedModel, block: Block, packed: bool) -> SharedPrompts:
        """Compute a block's prompts once, for all responses to them."""
        self.check()
        with torch.inference_mode():
            prompts = [self.samples[row].prompt_tokens for row in block.prompts]
            return SharedPrompts(body, prompts, packed=packed)
