"""Peak memory of one of several ranks that train a large model, by torch's own account of tensors that have no content.

    python benchmarks/learner/sharded_memory.py [--layers 64] [--ranks 8] [--tokens 8192] [--offload]

prints bytes of weights, gradients, moments, activations and temporary tensors at the peak of a step, for Qwen3-32B's
sizes. The learner's own code divides the model, passes a packed row forward and backward, and takes AdamW's step. No
GPU is needed, and nothing is exchanged. What a process needs beside tensors (the CUDA context, NCCL's buffers, kernels'
workspaces, fragmentation) comes on top: about 2 to 4 GB.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3Config

from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.distributed.sharding import hold_parts, unit_of
from rlhfless_functions.learning import optimizers
from rlhfless_functions.learning.optimizers import ModelOptimizer
from rlhfless_functions.model import narrow_head, output_head
from rlhfless_functions.settings import OptimizerSettings
from rlhfless_functions.weights.parts import drop_content

SIZE = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
"""Qwen3-32B's, without its 64 layers."""
GPU_BYTES = 80 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="in a micro-batch's packed row")
    parser.add_argument("--offload", action="store_true", help="optimizer.offload: moments and updates on the host")
    arguments = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=arguments.ranks)
    peak = measure(arguments.layers, arguments.ranks, arguments.tokens, offload=arguments.offload)
    for kind, size in peak.items():
        print(f"{kind:12} {size / 1e9:7.1f} GB")


def measure(layers: int, ranks: int, tokens: int, *, offload: bool) -> dict[str, int]:
    """Return the bytes of each kind of tensor at the peak of two steps: the second has moments from its beginning."""
    mesh = init_device_mesh("cpu", (ranks,))
    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(Ranks, "all", lambda self, value: [value]):
        model = AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=layers, **SIZE))
        drop_content(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        unit = unit_of(model, Ranks(0, ranks, mesh), torch.bfloat16)
        unit.can_wait = False
        hold_parts(unit, torch.device("cpu"))
        optimizer = ModelOptimizer(model, OptimizerSettings(learning_rate=1e-6, offload=offload))
        tracker = FSDPMemTracker(unit, *([] if offload else optimizer._optimizers))
        tracker.track_inputs(())
        with tracker, as_on_a_gpu():
            for _ in range(2):
                tracker.reset_mod_stats()
                step(unit, optimizer, tokens, update=not offload)
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return {getattr(kind, "value", str(kind)): size for kind, size in snapshot.items()}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let the head compute as on a GPU of this size, and let no tensor's content be asked for."""
    with (
        patch.object(output_head, "multiplies_narrow", lambda hidden: True),
        patch.object(output_head, "chunk_logits", lambda device: GPU_BYTES // 64 // 4),
        patch.object(narrow_head, "_product", lambda a, b, bias=None: torch.mm(a, b, out_dtype=torch.float32)),
        patch.object(torch.nn.utils, "clip_grad_norm_", lambda parameters, longest: 1.0),
        patch.object(optimizers, "whole", lambda norm: norm),
    ):
        yield


def step(unit: torch.nn.Module, optimizer: ModelOptimizer, tokens: int, *, update: bool) -> None:
    """Pass a row forward and backward, and update the weights unless the host does it."""
    ids = torch.zeros(1, tokens, dtype=torch.long)

    def compute(model: torch.nn.Module) -> torch.Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        log_probs, _ = output_head.token_log_probs(model, hidden, ids[0], 1.0, entropy=True)
        return log_probs.sum()

    unit(compute).backward()
    if update:
        optimizer.update(1.0)
    else:
        optimizer.clear()


if __name__ == "__main__":
    main()
