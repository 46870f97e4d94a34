"""The draw of tokens in vLLM: random numbers that depend only on the sample and the position."""

from dataclasses import dataclass
from typing import Any

import torch

from rlhfless_functions.generation.engines.randomness import uniforms
from rlhfless_functions.generation.engines.sampling import choose, likeliest

KEY = "rlhfless_key"
"""Name among a request's extra arguments: the key of its random numbers, shifted by the length of the prompt."""
END = "rlhfless_end"
"""Name among a request's extra arguments: the token that ends a sequence if its logits are not finite."""
GREEDY = "rlhfless_greedy"
"""Name among a request's extra arguments: whether to take the likeliest token. It is the same for all requests of a
run."""


@dataclass(frozen=True)
class _Batch:
    """The requests of vLLM's batch, in the batch's order and on its device."""

    metadata: Any
    """vLLM's own object for this batch. It makes another one when a request comes, goes or changes its place."""
    keys: torch.Tensor
    """[requests] int64"""
    ends: torch.Tensor
    """[requests] int64"""
    greedy: bool


class CounterSampler(torch.nn.Module):
    """Replaces vLLM's own draw: the random number of a token depends only on the sample and the position.

    vLLM restarts the generator of a seeded request when the request continues a response, and would repeat its numbers.
    On a CPU, a seed is an error if a prompt is prefilled in chunks. So requests have no seed. They carry the key of the
    counter-based numbers that the transformers engine uses too, and equal logits give equal tokens.

    A pass never waits for the device, and copies to it only the requests' lengths. What else it needs of the requests
    stays there until the batch changes.

    Args:
        runner: vLLM's model runner. Its batch has the request and the position of each row of logits. When vLLM
            measures its memory, the batch is empty, and any tokens will do.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner
        self._batch: _Batch | None = None

    def forward(
        self, logits: torch.Tensor, generators: Any, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [n] int64 and the log-probabilities of the whole vocabulary [n, vocabulary] float32.

        Args:
            logits: [n, vocabulary] float32, divided by the temperature. Row i belongs to row i of the batch.
            generators: not used: no request has a seed.
            k: not used: there is no top-k sampling.
            p: not used: there is no nucleus sampling.
        """
        rows = torch.arange(len(logits), device=logits.device)
        return self.draw(logits, len(logits), rows, torch.zeros_like(rows))

    def draw(
        self, logits: torch.Tensor, count: int, requests: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [n] int64 and the log-probabilities of the whole vocabulary [n, vocabulary] float32.

        Args:
            logits: [n, vocabulary], divided by the temperature.
            count: requests in the runner's batch.
            requests: [n] place of each row's request in the batch.
            offsets: [n] drafted tokens between the request's newest token and the row's.
        """
        log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        batch = self._on_device(count, logits.device)
        if batch.greedy:
            tokens, sound = likeliest(log_probs)
        else:
            # Tokens of the request before the row's, including the prompt.
            lengths = self._runner.input_batch.num_tokens_no_spec_cpu_tensor[:count]
            known = lengths.to(logits.device, non_blocking=True).long()
            tokens, sound = choose(log_probs, uniforms(batch.keys[requests], known[requests] + offsets))
        return torch.where(sound, tokens, batch.ends[requests]), log_probs

    def _on_device(self, count: int, device: torch.device) -> _Batch:
        batch = self._runner.input_batch
        held = self._batch
        if held is None or held.metadata is not batch.sampling_metadata or len(held.keys) != count:
            records = [self._runner.requests[name] for name in batch.req_ids[:count]]
            arguments = [record.sampling_params.extra_args for record in records]
            nobody = [0] * (count - len(arguments))
            keys, ends = (
                torch.tensor([given[name] for given in arguments] + nobody, dtype=torch.long) for name in (KEY, END)
            )
            keys, ends = (each.to(device, non_blocking=True) for each in (keys, ends))
            greedy = any(given[GREEDY] for given in arguments)
            held = self._batch = _Batch(batch.sampling_metadata, keys, ends, greedy)
        return held
