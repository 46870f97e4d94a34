"""What generates, and the numbers that users of vLLM tune. No torch here."""

from typing import Any, Literal

from pydantic import Field

from rlhfless_functions.settings.base import Settings

EngineName = Literal["vllm", "transformers"]


class VllmSettings(Settings):
    """vLLM's own settings, under its names; they count where vLLM generates."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of an instance that hold the model's layers in slices."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory for weights, activations and KV cache; on a CPU the cache is sized otherwise."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence, prompt and response together; the job's longest prompt and response if left out."""
    quantization: str | None = Field(default=None, min_length=1)
    """How vLLM quantizes the weights as it loads them, such as `fp8`; the trainer's stay as they are."""
    enforce_eager: bool | None = None
    """Whether to do without CUDA graphs and compilation; true on a CPU and false on a GPU if left out."""
    kv_cache_dtype: str = Field(default="auto", min_length=1)
    """Number format of keys and values, such as `fp8`; the model's own with `auto`."""
    extra_args: dict[str, Any] = Field(default={})
    """Any other arguments of vLLM's engine by their names, such as `max_num_seqs: 128`."""


class EngineSettings(Settings):
    """Everything that an engine is made from, besides the model."""

    name: Literal["auto", "vllm", "transformers"] = "auto"
    """What generates."""
    vllm: VllmSettings = VllmSettings()
    """Settings of vLLM."""
    sequence_tokens: int | None = Field(default=None, ge=1)
    """Longest sequence that will be asked for, prompt and response together; the model's longest if left out."""
    kv_budget_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the KV cache holds; from the free memory if left out."""
    share_prefixes: bool = False
    """Whether keys and values of shared prefixes may be read from other instances, where vLLM generates."""
    drafting: Literal["auto", "never"] = "never"
    """Whether tokens may be drafted, for which vLLM has to start as such."""
    sleeps: bool = False
    """Whether the instance gives its GPU's memory back between requests, so that vLLM starts with what that takes."""
