"""The draw of tokens in vLLM: random numbers that depend only on the sample and the position."""

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


class CounterSampler(torch.nn.Module):
    """Replaces vLLM's own draw: the random number of a token depends only on the sample and the position.

    vLLM restarts the generator of a seeded request when the request continues a response, and would repeat its numbers.
    On a CPU, a seed is an error if a prompt is prefilled in chunks. So requests have no seed. They carry the key of the
    counter-based numbers that the transformers engine uses too, and equal logits give equal tokens.

    Args:
        runner: vLLM's model runner. Its batch has the request and the position of each row of logits.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

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
        return draw_rows(self._runner, logits, len(logits), rows, torch.zeros_like(rows))


def draw_rows(
    runner: Any, logits: torch.Tensor, count: int, requests: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [n] int64 and the log-probabilities of the whole vocabulary [n, vocabulary] float32.

    Args:
        runner: vLLM's model runner.
        logits: [n, vocabulary], divided by the temperature.
        count: requests in the runner's batch.
        requests: [n] place of each row's request in the batch.
        offsets: [n] drafted tokens between the request's newest token and the row's.
    """
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    batch = runner.input_batch
    arguments = [runner.requests[name].sampling_params.extra_args for name in batch.req_ids[:count]]
    keys = torch.tensor([given[KEY] for given in arguments], dtype=torch.long, device=logits.device)
    if any(given[GREEDY] for given in arguments):
        tokens, sound = likeliest(log_probs)
    else:
        # Tokens of the request before the row's, including the prompt.
        known = batch.num_tokens_no_spec_cpu_tensor[:count].to(logits.device, torch.long)
        tokens, sound = choose(log_probs, uniforms(keys[requests], known[requests] + offsets))
    if not sound.all():
        ends = torch.tensor([given[END] for given in arguments], dtype=torch.long, device=logits.device)
        tokens = torch.where(sound, tokens, ends[requests])
    return tokens, log_probs
