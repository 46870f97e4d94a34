"""Turns a job's settings into the arguments of vLLM's engine. This module does not import vLLM."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from rlhfless_functions.generation.engines.memory import free_kv_tokens, kv_bytes_per_token
from rlhfless_functions.generation.engines.vllm.adapters import adapter_arguments
from rlhfless_functions.generation.engines.vllm.drafting import LONGEST_DRAFT, Proposer
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSettings, ModelSettings
from rlhfless_functions.weights.policy import torch_dtype

CPU_BLOCK_TOKENS = 32
"""On a CPU, the number of tokens in a block of the KV cache is a multiple of this."""
CPU_SEQUENCES = 256
"""Most sequences of a batch on a CPU, as many as vLLM's LLM class has."""
_SPARE_BLOCKS = 2
"""One is the null block, and one is left over if the budget is not a multiple of the block size."""

_ENVIRONMENT = {
    # The engine runs in this process: a step returns its tokens without a detour over sockets.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Our sampler replaces the one of this runner. The other runner keeps its batch inside kernels.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU_ENVIRONMENT = {
    # Several instances share the cores: bound to them, all would have the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind"
}
_OURS = {
    "model": "model.source",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "enable_lora": "model.lora",
    "max_loras": "model.lora",
    "max_cpu_loras": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "seed": "seed",
    "tensor_parallel_size": "generation.vllm.tensorParallelSize",
    "gpu_memory_utilization": "generation.vllm.gpuMemoryUtilization",
    "max_model_len": "generation.vllm.maxModelLen",
    "quantization": "generation.vllm.quantization",
    "enforce_eager": "generation.vllm.enforceEager",
    "kv_cache_dtype": "generation.vllm.kvCacheDtype",
    "kv_cache_memory_bytes": "generation.kvBudgetTokens",
    "num_gpu_blocks_override": "generation.kvBudgetTokens",
    "kv_transfer_config": "generation.sharePrefixes",
    "speculative_config": "generation.drafting",
    "spec_method": "generation.drafting",
    "spec_model": "generation.drafting",
    "spec_tokens": "generation.drafting",
}
"""Arguments that other fields of the job set."""
_FIXED = frozenset(
    {
        "async_scheduling", "data_parallel_size", "disable_log_stats", "enable_prefix_caching", "logits_processors",
        "logprobs_mode", "pipeline_parallel_size", "skip_tokenizer_init", "stream_interval", "use_tqdm_on_load",
        "worker_cls", "worker_extension_cls",
    }
)  # fmt: skip
"""Arguments that make samples and their log-probabilities correct."""


def prepare_environment(device: torch.device) -> None:
    """Set the environment variables that vLLM reads when it is first imported."""
    os.environ.update(_ENVIRONMENT)
    if device.type == "cpu":
        os.environ.update(_CPU_ENVIRONMENT)
        # On a CPU, compilation costs more at the start than it saves. `TORCHDYNAMO_DISABLE=0` in the pods turns it on.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def engine_arguments(
    folder: Path,
    config: PretrainedConfig,
    model: ModelSettings,
    settings: EngineSettings,
    device: torch.device,
    known: frozenset[str],
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine.

    Args:
        folder: local folder of the first weights.
        config: configuration in that folder.
        model: the job's model.
        settings: the job's engine settings.
        device: kind of the device.
        known: arguments of this version of vLLM.

    Raises:
        TaskError: `bad_request` for a KV cache that is too small for one sequence, and for arguments that vLLM does not
            have or that a job must not set.
    """
    given = settings.vllm
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": model.dtype,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": given.tensor_parallel_size,
        "gpu_memory_utilization": given.gpu_memory_utilization,
        "max_model_len": given.max_model_len or _within(config, settings.sequence_tokens),
        "quantization": given.quantization,
        "enforce_eager": (device.type == "cpu") if given.enforce_eager is None else given.enforce_eager,
        "kv_cache_dtype": given.kv_cache_dtype,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "rlhfless_functions.generation.engines.vllm.extension.WorkerExtension",
    }
    if settings.sleeps and device.type == "cuda":
        arguments["enable_sleep_mode"] = True  # refused on a CPU
    if device.type == "cpu":
        arguments |= {"block_size": CPU_BLOCK_TOKENS, "max_num_seqs": CPU_SEQUENCES}
    if model.lora is not None:
        arguments |= adapter_arguments(model.lora)
    extra = {name.lstrip("-").replace("-", "_"): value for name, value in given.extra_args.items()}
    _check(extra, known)
    arguments |= extra
    if drafts(settings):
        # On a GPU vLLM's passes have room enough for the drafts of as many requests as may draft there.
        arguments |= _drafting(arguments, scarce=model.lora is not None and device.type == "cpu")
    return arguments | _kv_cache(config, model, settings, device, arguments)


def drafts(settings: EngineSettings) -> bool:
    """Return whether vLLM starts with drafting. Two cases are not supported yet.

    - Tensor parallelism: each rank would draft for itself.
    - Shared prefixes: not tested.
    """
    return settings.drafting == "auto" and settings.vllm.tensor_parallel_size == 1 and not settings.share_prefixes


def _drafting(arguments: dict[str, Any], *, scarce: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's speculative decoding with our proposer. Where rows are scarce, its passes need
    room for the longest drafts of a full batch."""
    longest = LONGEST_DRAFT
    room = {}
    if scarce and "max_num_batched_tokens" in arguments:
        longest = min(longest, arguments["max_num_batched_tokens"] // arguments["max_num_seqs"] - 1)
    elif scarce:
        room = {"max_num_batched_tokens": arguments["max_num_seqs"] * (longest + 1)}
    if longest < 1:
        return {}
    proposer = f"{Proposer.__module__}.{Proposer.__name__}"
    speculation = {"method": "custom_class", "model": proposer, "num_speculative_tokens": longest}
    return {**room, "speculative_config": speculation}


def _check(extra: dict[str, Any], known: frozenset[str]) -> None:
    for name in extra:
        place = f"generation.vllm.extraArgs: {name}"
        if name in _OURS:
            raise TaskError("bad_request", f"{place} can't be set here; set {_OURS[name]} instead")
        if name in _FIXED:
            raise TaskError("bad_request", f"{place} can't be set, because samples depend on it; remove it")
        if name not in known:
            raise TaskError("bad_request", f"{place} is not an argument of this version of vLLM; correct or remove it")


def _kv_cache(
    config: PretrainedConfig,
    model: ModelSettings,
    settings: EngineSettings,
    device: torch.device,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Return the size of the KV cache: the job's budget. Without one, on a CPU, full batches determine it, if there is
    so much memory."""
    text = config.get_text_config()
    longest = arguments["max_model_len"] or text.max_position_embeddings
    block = arguments.get("block_size") or CPU_BLOCK_TOKENS
    budget = settings.kv_budget_tokens
    if budget is None and device.type != "cpu":
        return {}
    dtype = torch_dtype(model)
    if budget is None:
        needed = arguments["max_num_seqs"] * _blocks(longest, block) * block
        budget = max(longest, min(needed, free_kv_tokens(text, dtype, device, 0)))
    if longest > budget:
        raise TaskError(
            "bad_request",
            f"generation.kvBudgetTokens ({budget}) is too small for a sequence of {longest} tokens, the longest prompt"
            " and response (or generation.vllm.maxModelLen); raise it, or lower sampling.maxResponseTokens",
        )
    tokens = (_blocks(budget, block) + _SPARE_BLOCKS) * block
    return {"kv_cache_memory_bytes": tokens * kv_bytes_per_token(text, dtype)}


def _within(config: PretrainedConfig, tokens: int | None) -> int | None:
    """Return at most the model's number of positions. Longer sequences are refused one by one."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(tokens, positions) if tokens and positions else tokens


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)
