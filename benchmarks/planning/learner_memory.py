"""A learner's peak memory as torch counts it: a training step on fake tensors, which have sizes and no content.

The step is the learner's own: its modules, its division among ranks (FSDP2), its output head and its optimizer. A
packed row stands for a micro-batch. Nothing is computed. All layers of a model are alike, so a few of them show what
each takes.

    python benchmarks/planning/learner_memory.py --json benchmarks/planning/results/learner_memory.json
"""

import argparse
import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations import moe

from rlhfless_functions.distributed import sharding
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.distributed.sharding import Unit, unit_of
from rlhfless_functions.learning import optimizers
from rlhfless_functions.learning.state import _make_trainable
from rlhfless_functions.model import narrow_head, output_head
from rlhfless_functions.model.forward import body_of
from rlhfless_functions.model.output_head import token_log_probs
from rlhfless_functions.model.packed_attention import PACKED, packed_hidden
from rlhfless_functions.model.packing import Packing
from rlhfless_functions.settings import LoraSettings, OptimizerSettings
from rlhfless_functions.weights.adapters import attach_adapter
from rlhfless_functions.weights.row_bits import EXPERTS
from rlhfless_operator.planner.latency.devices import model_shape
from rlhfless_operator.planner.latency.roofline import H100
from rlhfless_operator.planner.memory import LearnerSetup, learner_memory
from rlhfless_operator.training.costs.model_shape import known_models

MODELS = (
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b",
    "qwen3-30b-a3b", "mixtral-8x7b",
)  # fmt: skip
_KINDS = {"qwen3-30b-a3b": "qwen3_moe", "mixtral-8x7b": "mixtral"}
_SETTINGS = ((1, False, None), (1, True, None), (1, True, 16), (8, True, None))
"""Ranks, gradient checkpointing and rank of the adapter."""

_SAMPLE_TOKENS = 1024
_GPU_BYTES = int(H100.memory)


class StorageCount(TorchDispatchMode):
    """Counts the bytes of all storages that exist, by their births, deaths and changes of size."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}

    def see(self, value: Any) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        if not isinstance(value, torch.Tensor):
            return
        if hasattr(value, "to_local"):
            value = value._local_tensor
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self._add(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage's new size."""
        if storage._cdata in self._sizes:
            self._add(storage._cdata, storage.nbytes())

    def _add(self, key: int, size: int) -> None:
        self.bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self.see(leaf)
        return result


@contextmanager
def _counting() -> Iterator[StorageCount]:
    counted = StorageCount()
    resize = torch.UntypedStorage.resize_

    def counted_resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        counted.resized(storage)
        return storage

    torch.UntypedStorage.resize_ = counted_resize  # type: ignore[assignment,method-assign]
    try:
        with counted:
            yield counted
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def ranks_of(processes: int) -> Ranks:
    """Join so many ranks of which only this one exists. A process can do that once."""
    if processes == 1:
        return Ranks()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    return Ranks(0, processes, init_device_mesh("cpu", (processes,)))


def peak_bytes(
    config: PreTrainedConfig, ranks: Ranks, tokens: int, *, checkpointing: bool, lora_rank: int | None = None
) -> int:
    """Return the most bytes that exist at a time in the second step of a learner's rank.

    Args:
        config: of the model.
        tokens: of a micro-batch, in samples of 1,024.
        checkpointing: as `learning.gradientCheckpointing`.
        lora_rank: rank of an adapter; None trains all weights.
    """
    optimizers.whole = lambda tensor: 1.0  # type: ignore[assignment] # A norm has no value here.
    moe._grouped_mm = lambda rows, weight, offs: _GroupedProduct.apply(rows.to(weight.dtype), weight)
    config._attn_implementation, config._experts_implementation = PACKED, EXPERTS
    gc.collect()
    with _as_on_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True), _counting() as counted:
        dtype = torch.float32 if lora_rank is None else torch.bfloat16
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if lora_rank is not None:
            # Modules can't be converted in the midst of counting, because fake tensors are referred to weakly.
            with patch.object(nn.Module, "to", lambda module, *given, **named: module):
                model = attach_adapter(model, LoraSettings(rank=lora_rank))
        _make_trainable(model, checkpointing, False)
        unit = unit_of(model, ranks, torch.bfloat16 if lora_rank is None else torch.float32)
        optimizer = optimizers.ModelOptimizer(model, OptimizerSettings())
        for _ in range(2):
            gc.collect()
            counted.peak = counted.bytes
            for more in (True, False):
                unit.wait_with_gradients(more)
                _pass(model, unit, tokens, cast=lora_rank is None and ranks.size == 1)
            optimizer.update(1.0)
        return counted.peak


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Let the learner choose as on an H100: products of the head, its chunks, and whether whole gradients wait."""

    def has_memory(model: nn.Module, ranks: Ranks) -> bool:
        learnt = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return 4 * learnt <= sharding._SHARE_OF_GRADIENTS * _GPU_BYTES

    with (
        patch.object(Ranks, "all", lambda ranks, value: [value]),
        patch.object(sharding, "_has_memory_for_gradients", has_memory),
        patch.object(output_head, "multiplies_narrow", lambda hidden: True),
        patch.object(output_head, "chunk_logits", lambda device: int(_GPU_BYTES * narrow_head._SHARE_OF_MEMORY) // 4),
        patch.object(narrow_head, "_product", _product),
    ):
        yield


def _product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return left.new_empty(len(left), right.shape[1], dtype=torch.float32)


class _GroupedProduct(torch.autograd.Function):
    """The products of experts, with their sizes alone: which rows an expert has depends on content."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight)


def _pass(model: Any, unit: Unit, tokens: int, *, cast: bool) -> None:
    ids = torch.zeros(1, tokens, dtype=torch.long)
    lengths = [min(_SAMPLE_TOKENS, tokens - start) for start in range(0, tokens, _SAMPLE_TOKENS)]

    def compute(policy: Any) -> Any:
        hidden = packed_hidden(body_of(policy), ids, Packing(lengths)).flatten(0, 1)
        return token_log_probs(policy, hidden, ids.flatten(), 1.0, entropy=True)[0]

    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = -unit(compute).sum()
    loss.backward()


def compare(
    config: dict[str, Any], kind: str, ranks: Ranks, tokens: int, *, checkpointing: bool, lora_rank: int | None
) -> dict[str, Any]:
    """Return the bytes that torch counts beside those of the planner's account.

    Args:
        config: fields of the model's configuration.
        kind: its `model_type`.
    """
    made = AutoConfig.for_model(kind, **config)
    counted = peak_bytes(made, ranks, tokens, checkpointing=checkpointing, lora_rank=lora_rank)
    setup = LearnerSetup(ranks=ranks.size, tokens=tokens, checkpointing=checkpointing, lora_rank=lora_rank)
    account = learner_memory(model_shape(kind, config), setup).total
    return {
        "layers": config["num_hidden_layers"],
        "tokens": tokens,
        "ranks": ranks.size,
        "checkpointing": checkpointing,
        "lora_rank": lora_rank,
        "torch": counted,
        "account": round(account),
        "difference": round(account / counted - 1, 4),
    }


def main() -> None:
    """Compare models, each number of ranks in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--config", help="fields of another model's configuration, as JSON with its model_type")
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.ranks is None:
        rows = []
        for count in sorted({ranks for ranks, _, _ in _SETTINGS}):
            command = [sys.executable, __file__, *sys.argv[1:], "--ranks", str(count)]
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows += [json.loads(line) for line in told.splitlines()]
        if given.json:
            Path(given.json).write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        return
    ranks = ranks_of(given.ranks)
    configs = {name: {**known_models()[name], "model_type": _KINDS.get(name, "qwen2")} for name in given.models}
    if given.config:
        configs = {"given": json.loads(given.config)}
    for name, fields in configs.items():
        kind = fields.pop("model_type")
        layers = min(given.layers, fields["num_hidden_layers"])
        for count, checkpointing, lora in _SETTINGS:
            # An adapter on all layers leaves experts out: peft adapts linear layers.
            if count == given.ranks and not (lora and kind != "qwen2"):
                config = {**fields, "num_hidden_layers": layers}
                row = compare(config, kind, ranks, given.tokens, checkpointing=checkpointing, lora_rank=lora)
                print(json.dumps({"model": name, **row}), flush=True)


if __name__ == "__main__":
    main()
