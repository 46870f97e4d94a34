"""rlhfless's additions to vLLM's workers: its own draw of tokens, and weights that are replaced in place.

vLLM mixes this class into its worker (`worker_extension_cls`) in each process that holds a slice of the model, and
calls its methods by name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from rlhfless_functions.generation.engines.vllm.draws import CounterSampler
from rlhfless_functions.generation.engines.vllm.graphs import capture_widths
from rlhfless_functions.generation.engines.vllm.verification import Verifier

if TYPE_CHECKING:
    from rlhfless_functions.generation.engines.vllm.drafting import DraftedRequests


class WorkerExtension:
    """Methods that rlhfless adds to vLLM's workers."""

    model_runner: Any

    def draft_for(self, requests: "DraftedRequests | None") -> None:
        """Propose drafts for the requests of a run, or for none. vLLM runs in the process of its worker here."""
        self.model_runner.drafter.requests = requests

    def prefix_traffic(self) -> dict[str, float]:
        """Return the counts of shared prefixes that this worker has sent and fetched; empty if the model's can't be
        shared."""
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


def replace_draw() -> None:
    """Give each model runner of vLLM our draw when it is made: vLLM's measurement of its memory then includes it. Call
    this once in a process, before there is one."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    make = GPUModelRunner.__init__

    @wraps(make)
    def make_with_our_draw(runner: Any, *arguments: Any, **named: Any) -> None:
        make(runner, *arguments, **named)
        draw = runner.sampler.topk_topp_sampler = CounterSampler(runner)
        if runner.speculative_config is not None:
            runner.rejection_sampler = Verifier(runner, draw)
            runner.drafter.attach(runner)
            capture_widths(runner)

    GPUModelRunner.__init__ = make_with_our_draw


def _tensors(files: Iterable[Path], tied_head: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its name. A tensor that the output layer shares with the embedding comes under both
    names: vLLM packs a copy for the output layer, and this copy has to be replaced too."""
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
