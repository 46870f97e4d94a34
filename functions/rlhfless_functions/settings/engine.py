"""The inference engine, and the settings of vLLM. This module does not import torch."""

from typing import Any, Literal

from pydantic import Field

from rlhfless_functions.settings.base import Settings

EngineName = Literal["vllm", "transformers"]


class VllmSettings(Settings):
    """vLLM's own settings, by vLLM's names. They apply if vLLM generates."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs that an instance splits the model's layers over."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory for weights, activations and KV cache. On a CPU the cache is sized differently."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence, prompt and response together; by default the job's longest prompt plus its longest response."""
    quantization: str | None = Field(default=None, min_length=1)
    """How vLLM quantizes the weights when it loads them, such as `fp8`. The trainer's weights do not change."""
    enforce_eager: bool | None = None
    """Whether to disable CUDA graphs and compilation; by default true on a CPU and false on a GPU."""
    kv_cache_dtype: str = Field(default="auto", min_length=1)
    """Number format of keys and values, such as `fp8`; `auto` uses the model's."""
    extra_args: dict[str, Any] = Field(default={})
    """Other arguments of vLLM's engine by name, such as `max_num_seqs: 128`."""


class EngineSettings(Settings):
    """All settings of an engine, besides the model."""

    name: Literal["auto", "vllm", "transformers"] = "auto"
    """Inference engine."""
    vllm: VllmSettings = VllmSettings()
    """Settings of vLLM."""
    sequence_tokens: int | None = Field(default=None, ge=1)
    """Longest sequence of a request, prompt and response together; by default the model's longest."""
    kv_budget_tokens: int | None = Field(default=None, ge=1)
    """Capacity of the KV cache in tokens; by default as many as the free memory holds."""
    share_prefixes: bool = False
    """Whether vLLM may read the keys and values of shared prefixes from other instances."""
    drafting: Literal["auto", "never"] = "never"
    """Whether tokens may be drafted. vLLM needs this setting at its start."""
    sleeps: bool = False
    """Whether the instance releases its GPU's memory between requests. vLLM needs this setting at its start."""
