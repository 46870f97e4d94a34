"""Keys and values of shared prefixes, computed by one instance and read by the others, as a KV connector of vLLM.

A request may say that the beginning of its prompt is shared, and whether this instance computes it. The computing
instance writes the blocks of the prefix to a file once they are computed. The others wait for the file, read it into
their own blocks and continue from its end. Files are in a folder that the instances share, and are named after the
weights, the tokens and the format of this kind of machine, so they can't be mistaken for each other. If the instances
share only a store, a `PrefixExchange` carries the files between the folders of instances.

Models whose layers do not all attend to everything (sliding windows, Mamba) share nothing: vLLM keeps their blocks in
several groups, or drops some.

vLLM makes two of these objects: one in its scheduler, which decides, and one in each worker, which copies.
"""

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from rlhfless_functions.generation.prefix_exchange import PrefixExchange

logger = logging.getLogger(__name__)

PREFIX = "rlhfless_prefix"
"""Name among a request's parameters of KV transfer."""
_PAUSE_SECONDS = 0.005
"""Seconds between two checks for a file while there is nothing else to do."""


def connector_settings() -> dict[str, Any]:
    """Return the arguments of vLLM's KVTransferConfig."""
    return {
        "kv_connector": SharedPrefixConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def request_parameters(
    folder: str, weights: str, tokens: Sequence[int], *, source: bool, wait_seconds: float
) -> dict[str, Any]:
    """Return the description of a shared prefix in a request.

    Args:
        folder: folder that the instances share; the first write creates it.
        weights: weights with which the keys and values are computed.
        tokens: the prefix. If it ends within a block, the tokens of this block are not shared.
        source: whether this instance computes it.
        wait_seconds: longest wait for another instance to compute it.
    """
    return {
        PREFIX: {
            "folder": folder,
            "weights": weights,
            "tokens": list(tokens),
            "source": source,
            "wait_seconds": wait_seconds,
        }
    }


@dataclass(frozen=True)
class _Prefix:
    """The shared prefix of a request, in whole blocks."""

    file: Path
    tokens: int
    source: bool
    wait_seconds: float


@dataclass(frozen=True)
class _Copy:
    """Blocks of the cache that belong to consecutive blocks of a file."""

    file: Path
    first: int
    blocks: list[int]


@dataclass
class _Work(KVConnectorMetadata):  # type: ignore[misc]
    """The copies that workers make in a step."""

    loads: list[_Copy] = field(default_factory=list)
    saves: list[_Copy] = field(default_factory=list)


@dataclass
class PrefixTraffic:
    """Counts of what a worker has sent and fetched."""

    tokens_sent: int = 0
    tokens_fetched: int = 0
    bytes_sent: int = 0
    bytes_fetched: int = 0
    seconds_sent: float = 0.0
    seconds_fetched: float = 0.0


class SharedPrefixConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. vLLM's documentation explains each method. Without `SupportsHMA`, vLLM would keep all tokens of
    layers with a sliding window."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size = int(vllm_config.cache_config.block_size)
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self._form = _form(vllm_config)
        groups = kv_cache_config.kv_cache_groups
        self.shares = len(groups) == 1 and type(groups[0].kv_cache_spec) in (FullAttentionSpec, MLAAttentionSpec)
        """Whether this model's prefixes can be shared."""
        # The scheduler's.
        self._asked: dict[str, _Prefix | None] = {}
        self._loads: dict[str, tuple[_Prefix, int]] = {}
        self._sources: dict[str, _Prefix] = {}
        self._give_up: dict[str, float] = {}
        self._waiting = False
        self.seconds_waited = 0.0
        """Seconds that the run waited for prefixes with nothing else to do."""
        self.exchange: PrefixExchange | None = None
        """Carries the files of the present run through a store; None if a shared folder has them."""
        # A worker's.
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()
        self.traffic = PrefixTraffic()

    # --- scheduler -----------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of further tokens that can be read; None means to ask again later."""
        prefix = self._prefix_of(request)
        if prefix is None or num_computed_tokens >= prefix.tokens:
            return 0, False
        if self._complete(prefix.file):
            return prefix.tokens - num_computed_tokens, False
        if prefix.source:
            return 0, False
        now = time.monotonic()
        if now < self._give_up.setdefault(request.request_id, now + prefix.wait_seconds):
            if self.exchange is not None:
                for part in self._parts(prefix.file):
                    self.exchange.want(part.name)
            self._waiting = True
            return None, False
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record what to copy for a request that has got its blocks."""
        prefix = self._prefix_of(request)
        if prefix is None:
            return
        if num_external_tokens:
            self._loads[request.request_id] = prefix, prefix.tokens - num_external_tokens
        elif prefix.source and not self._complete(prefix.file):
            self._sources[request.request_id] = prefix

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the copies that workers make in this step."""
        work, state = _Work(), scheduler_output.kv_connector_block_state
        for name, (prefix, begin) in self._loads.items():
            first = begin // self._block_size
            blocks = state.get_block_ids(name)[0][first : prefix.tokens // self._block_size]
            work.loads.append(_Copy(prefix.file, first, blocks))
        self._loads.clear()
        saved = set()
        for name, computed in _computed(scheduler_output):
            source = self._sources.get(name)
            if source is not None and computed >= source.tokens:
                if source.file not in saved:
                    blocks = state.get_block_ids(name)[0][: source.tokens // self._block_size]
                    work.saves.append(_Copy(source.file, 0, blocks))
                    if self.exchange is not None:
                        for part in self._parts(source.file):
                            self.exchange.send(part.name)
                saved.add(source.file)
        self._sources = {name: each for name, each in self._sources.items() if each.file not in saved}
        for name in scheduler_output.finished_req_ids:
            self._asked.pop(name, None)
            self._sources.pop(name, None)
            self._give_up.pop(name, None)
        if self._waiting and not scheduler_output.num_scheduled_tokens:
            time.sleep(_PAUSE_SECONDS)
            self.seconds_waited += _PAUSE_SECONDS
        self._waiting = False
        return work

    def _prefix_of(self, request: Any) -> _Prefix | None:
        if request.request_id not in self._asked:
            given = (request.kv_transfer_params or {}).get(PREFIX) if self.shares else None
            self._asked[request.request_id] = self._whole_blocks(given) if given else None
        return self._asked[request.request_id]

    def _whole_blocks(self, given: dict[str, Any]) -> _Prefix | None:
        tokens = len(given["tokens"]) // self._block_size * self._block_size
        if not tokens:
            return None
        digest = hashlib.blake2b(f"{self._form} {given['weights']} ".encode(), digest_size=16)
        digest.update(torch.tensor(given["tokens"][:tokens], dtype=torch.int64).numpy().tobytes())
        file = Path(given["folder"]) / digest.hexdigest()
        return _Prefix(file, tokens, given["source"], given["wait_seconds"])

    def _complete(self, file: Path) -> bool:
        return all(part.exists() for part in self._parts(file))

    def _parts(self, file: Path) -> list[Path]:
        return [_part(file, rank, self._ranks) for rank in range(self._ranks)]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Do nothing: blocks are copied before a request ends."""
        return False, None

    # --- workers -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Store the caches: [blocks, heads, tokens of a block, twice the head size] each."""
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Read the blocks that this step needs. Blocks that can't be read are computed."""
        del forward_context, kwargs
        for copy in self._get_connector_metadata().loads:
            began = time.monotonic()
            try:
                self.traffic.bytes_fetched += self._read(copy)
                self.traffic.tokens_fetched += len(copy.blocks) * self._block_size
            except (OSError, SafetensorError, ValueError):
                logger.warning("a shared prefix could not be read and is computed instead", exc_info=True)
                self._failed |= set(copy.blocks)
            self.traffic.seconds_fetched += time.monotonic() - began

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: everything has been read when the step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: all layers are written together when the step ends."""

    def wait_for_save(self) -> None:
        """Write the blocks that this step has computed."""
        for copy in self._get_connector_metadata().saves:
            began = time.monotonic()
            try:
                self.traffic.bytes_sent += self._write(copy)
                self.traffic.tokens_sent += len(copy.blocks) * self._block_size
            except (OSError, SafetensorError):
                logger.warning("a shared prefix could not be written; other actors compute it", exc_info=True)
            self.traffic.seconds_sent += time.monotonic() - began

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be read since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _read(self, copy: _Copy) -> int:
        size = 0
        with safe_open(_part(copy.file, _rank(), self._ranks), framework="pt", device="cpu") as tensors:
            for name, cache in self._caches.items():
                blocks = tensors.get_slice(name)[copy.first : copy.first + len(copy.blocks)]
                if blocks.shape != (len(copy.blocks), *cache.shape[1:]):
                    raise ValueError(f"{copy.file}: {name} has blocks of another format")
                cache[copy.blocks] = blocks.to(cache.device)
                size += blocks.nbytes
        return size

    def _write(self, copy: _Copy) -> int:
        tensors = {name: cache[copy.blocks].cpu() for name, cache in self._caches.items()}
        file = _part(copy.file, _rank(), self._ranks)
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_name(f".tmp-{os.getpid()}-{file.name}")
        save_file(tensors, own)
        own.replace(file)
        return sum(tensor.nbytes for tensor in tensors.values())


def _computed(scheduler_output: Any) -> list[tuple[str, int]]:
    """Return the number of tokens of each request that are computed after this step."""
    scheduled, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
    before = [(each.req_id, each.num_computed_tokens) for each in scheduler_output.scheduled_new_reqs]
    before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return [(name, tokens + scheduled.get(name, 0)) for name, tokens in before]


def _part(file: Path, rank: int, ranks: int) -> Path:
    return file.with_name(f"{file.name}-{rank + 1}-of-{ranks}.safetensors")


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _form(vllm_config: Any) -> str:
    """Return the format of keys and values on this kind of machine. On a CPU, each kernel has its own order of a
    block's numbers."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    features = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {' '.join(features)}"
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return f"{model.dtype} {cache.cache_dtype} {cache.block_size} {ranks} {device}"
