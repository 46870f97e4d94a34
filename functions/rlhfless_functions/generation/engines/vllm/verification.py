"""Verification of drafted tokens in vLLM: keeps the drafts that rlhfless would have drawn itself.

It replaces vLLM's rejection sampler (`vllm/v1/sample/rejection_sampler.py` of vLLM 0.32), which keeps the distribution
but draws other tokens. Here a draft is right if the sample's random number gives the same token at that position, so
drafting changes no token.
"""

from typing import Any

import torch

from rlhfless_functions.generation.engines.vllm.draws import CounterSampler


class Verifier(torch.nn.Module):
    """Draws a token for each row of logits, and keeps a request's tokens up to the first that differs from its draft.

    Args:
        runner: vLLM's model runner.
        sampler: draws from its batch.
    """

    def __init__(self, runner: Any, sampler: CounterSampler) -> None:
        super().__init__()
        self._runner = runner
        self._sampler = sampler

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Return vLLM's `SamplerOutput`.

        Args:
            metadata: drafts of each request in the batch's order; a request may have none.
            draft_probs: not used: a draft is one token, with no distribution.
            logits: [requests + drafts, vocabulary]. The rows of a request are adjacent: the first belongs to its newest
                token, the next to its first draft, and so on.
            sampling_metadata: the temperature of each request.
        """
        self._runner.drafter.tried = metadata.num_draft_tokens
        if metadata.max_spec_len == 0:
            return self._runner.sampler(logits=logits, sampling_metadata=sampling_metadata)
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        requests, width = len(metadata.num_draft_tokens), metadata.max_spec_len + 1
        counts = torch.tensor(metadata.num_draft_tokens) + 1
        request = torch.repeat_interleave(torch.arange(requests), counts)
        offset = torch.arange(len(request)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        is_draft = offset < counts[request] - 1
        drafted, request, offset = (
            each.to(logits.device, non_blocking=True)
            for each in (torch.stack([request[is_draft], offset[is_draft]]), request, offset)
        )

        temperature = sampling_metadata.temperature
        if temperature is not None:
            logits = logits.float() / temperature[request, None]
        tokens, log_probs = self._sampler.draw(logits, requests, request, offset)
        drawn = tokens.new_full((requests, width), -1)
        drawn[request, offset] = tokens
        proposed = tokens.new_full((requests, width), -2)
        proposed[drafted[0], drafted[1]] = metadata.draft_token_ids.to(tokens.dtype)
        right = (drawn == proposed).long().cumprod(1).sum(1)
        kept = torch.arange(width, device=logits.device) <= right[:, None]

        # Gather first and spread over requests afterwards: copies of the whole vocabulary would be too large.
        chosen = log_probs.new_zeros((requests, width))
        chosen[request, offset] = log_probs.gather(1, tokens[:, None])[:, 0]
        return SamplerOutput(
            sampled_token_ids=torch.where(kept, drawn, -1).to(torch.int32),
            logprobs_tensors=LogprobsTensors(
                logprob_token_ids=drawn.clamp(min=0).reshape(-1, 1).to(torch.int32),
                logprobs=chosen.reshape(-1, 1),
                selected_token_ranks=drawn.new_zeros(requests * width),
            ),
        )
