"""rlhfless's additions to vLLM's workers: its own random numbers for sampling, and weights that are replaced in place.

vLLM mixes this class into its worker (`worker_extension_cls`) in each process that holds a slice of the model, and
calls its methods by name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from rlhfless_functions.generation.engines.randomness import uniforms
from rlhfless_functions.generation.engines.sampling import choose, likeliest

if TYPE_CHECKING:
    from rlhfless_functions.generation.engines.vllm.drafting import DraftedRequests

KEY = "rlhfless_key"
"""Name among a request's extra arguments: the key of its random numbers, shifted by the length of the prompt."""
END = "rlhfless_end"
"""Name among a request's extra arguments: the token that ends a sequence if its logits are not finite."""
GREEDY = "rlhfless_greedy"
"""Name among a request's extra arguments: whether to take the likeliest token. It is the same for all requests of a
run."""


class CounterSampler(torch.nn.Module):
    """Replaces vLLM's own draw: the random number of a token depends only on the sample and the position.

    vLLM restarts the generator of a seeded request when the request continues a response, and would repeat its
    numbers. On a CPU, a seed is an error if a prompt is prefilled in chunks. So requests have no seed. They carry the
    key of the counter-based numbers that the transformers engine uses too, and equal logits give equal tokens.

    Args:
        runner: vLLM's model runner. Its batch has the request and the position of each row of logits.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

    def forward(
        self, logits: torch.Tensor, generators: Any, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n] int64 and the log-probabilities of the whole vocabulary [n, vocabulary] float32.

        Args:
            logits: [n, vocabulary] float32, divided by the temperature; row i is the batch's.
            generators: not used: no request has a seed.
            k: not used: there is no top-k sampling.
            p: not used: there is no nucleus sampling.
        """
        rows = torch.arange(len(logits), device=logits.device)
        return draw_rows(self._runner, logits, len(logits), rows, torch.zeros_like(rows))


def draw_rows(
    runner: Any, logits: torch.Tensor, count: int, requests: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [n] int64 and the log-probabilities of the whole vocabulary [n, vocabulary] float32.

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


class WorkerExtension:
    """Methods that rlhfless adds to vLLM's workers."""

    model_runner: Any

    def install_sampler(self) -> None:
        """Replace vLLM's draw. Call this once, before the first request."""
        runner = self.model_runner
        runner.sampler.topk_topp_sampler = CounterSampler(runner)
        if runner.speculative_config is not None:
            from rlhfless_functions.generation.engines.vllm.verification import Verifier

            runner.rejection_sampler = Verifier(runner)
            runner.drafter.attach(runner)

    def draft_for(self, requests: "DraftedRequests | None") -> None:
        """Propose drafts for the requests of a run, or for none. vLLM runs in the process of its worker here."""
        self.model_runner.drafter.requests = requests

    def prefix_traffic(self) -> dict[str, float]:
        """What this worker has sent and fetched of shared prefixes; empty if the model's can't be shared."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        return asdict(connector.traffic) if connector.shares else {}

    def erase_blocks(self) -> None:
        """Overwrite all keys and values with zeros. The caller has emptied the prefix cache."""
        for cache in self.model_runner.kv_caches:
            # A layer with a recurrent state has several tensors.
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.zero_()

    def replace_weights(self, files: list[str], tied: bool) -> None:
        """Replace all weights in place by those of a checkpoint. The caller has checked that it is complete.

        Args:
            files: paths of its safetensors files.
            tied: whether the output layer shares the embedding's weight.
        """
        # Models whose output layer is the embedding itself (Gemma 2) have no output layer of their own.
        head = tied and hasattr(self.model_runner.get_model(), "lm_head")
        self.model_runner.reload_weights(weights_iterator=_tensors([Path(file) for file in files], head))


def _tensors(files: Iterable[Path], tied_head: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its name. If the output layer shares the embedding's tensor, it is listed under both names:
    vLLM packs a copy for the output layer, and this copy has to be replaced too."""
    embedding: torch.Tensor | None = None
    head = False
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                tensor = tensors.get_tensor(name)
                yield name, tensor
                if name.endswith("embed_tokens.weight"):
                    embedding = tensor
                head = head or name == "lm_head.weight"
    if tied_head and not head and embedding is not None:
        yield "lm_head.weight", embedding
