"""Latency from the data sheet, for hardware and models that no table covers.

A decode step takes the longer of reading (weights and KV cache) and arithmetic, each at the part of the peak that
engines reach: max(2·P·b / (F·mfu), (W + b·context·kv) / (B·mbu)) plus a constant. P are the parameters that a token
passes, W the weights that the batch reads: of a mixture of experts, not all. On one GPU that is within a third of
the measurements. With tensor parallelism it is optimistic for large batches, because all messages count as small.
"""

from dataclasses import dataclass, field

from rlhfless_operator.planner.latency.linear import DecodeTable, InstanceProfile

MEMORY_UTILISATION = 0.75
"""Part of the peak bandwidth that decoding reaches; published figures are 0.65 to 0.82."""
DECODE_UTILISATION = 0.6
"""Part of the peak arithmetic that a large decode batch reaches."""
PREFILL_UTILISATION = 0.68
"""Part of the peak arithmetic that prefill reaches; published figures are 0.64 to 0.73."""
STEP_OVERHEAD_SECONDS = 0.5e-3
"""Time of a step's scheduling, sampling and kernel launches."""
HOP_SECONDS = 12e-6
"""Time of one all-reduce of a small message within a node; a layer has two."""
RESERVED = 0.12
"""Part of a GPU's memory that is neither weights nor KV cache."""
LOAD_BYTES_PER_SECOND = 4e9
"""Rate at which weights go from the store or a relay into one GPU."""
HOST_UTILISATION = 0.8
"""Part of the link's peak that copies between a GPU and its host's pinned memory reach."""

_BATCHES = (1, 8, 32, 64, 128, 256)
_CONTEXTS = (128, 512, 2048, 8192)


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet."""

    name: str
    flops: float
    """Dense bfloat16 operations per second."""
    bandwidth: float
    """Bytes of memory read per second."""
    memory: float
    """Bytes."""
    host_bandwidth: float
    """Bytes per second between its memory and its host's, one way."""


@dataclass(frozen=True)
class Layer:
    """The sizes of a decoder's layers, which are all alike, and of its embeddings. Memory depends on them."""

    hidden: int
    """Width of the hidden states."""
    vocabulary: int
    heads: int
    """Attention heads: an engine divides them among its GPUs."""
    query: int
    """Width of all heads' queries."""
    key: int
    """Width of all heads' keys, and of their values."""
    inner: int
    """Width of the feed-forward layers that a token passes: of all its experts."""
    parameters: float
    tied: bool
    """Whether the embeddings are the output head, too."""
    expert_parameters: float = 0.0
    """Parameters of all experts of a layer; 0 for a dense model."""
    experts: int = 0
    chosen: int = 0
    """Experts that a token passes."""

    @property
    def embedding(self) -> float:
        """Parameters of the embeddings, or of the output head."""
        return float(self.vocabulary * self.hidden)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model on which latency and memory depend."""

    name: str
    parameters: float
    kv_bytes: int
    """Bytes of KV cache for one token."""
    layers: int
    layer: Layer | None = field(default=None, compare=False)
    """Sizes of a layer; None if only latency is asked for."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights in bfloat16."""
        return 2 * self.parameters

    @property
    def active_parameters(self) -> float:
        """Parameters that a token passes."""
        return self.touched_parameters(1)

    def touched_parameters(self, tokens: int) -> float:
        """Return the parameters that a pass of so many tokens reads, if each token's experts are as good as random."""
        if self.layer is None or not self.layer.experts:
            return self.parameters
        missed = (1 - self.layer.chosen / self.layer.experts) ** tokens
        return self.parameters - missed * self.layers * self.layer.expert_parameters


L40S = Gpu("L40S", 362e12, 864e9, 48e9, 32e9)
A100 = Gpu("A100", 312e12, 2039e9, 80e9, 32e9)
H100 = Gpu("H100", 989e12, 3350e9, 80e9, 64e9)
H200 = Gpu("H200", 989e12, 4800e9, 141e9, 64e9)
GPUS = {gpu.name: gpu for gpu in (L40S, A100, H100, H200)}

QWEN_3B = ModelShape("Qwen2.5-3B", 3.09e9, 36_864, 36)
QWEN_7B = ModelShape("Qwen2.5-7B", 7.62e9, 57_344, 28)
LLAMA_70B = ModelShape("Llama-2-70B", 69.0e9, 327_680, 80)
MODELS = {model.name: model for model in (QWEN_3B, QWEN_7B, LLAMA_70B)}


def roofline(model: ModelShape, gpu: Gpu, gpus: int) -> DecodeTable:
    """Return the decode and prefill times of `model` on `gpus` GPUs with tensor parallelism, on the usual grid."""
    hops = 2 * model.layers * HOP_SECONDS if gpus > 1 else 0.0

    def step(batch: int, context: int) -> float:
        arithmetic = 2 * model.active_parameters * batch / (gpus * gpu.flops * DECODE_UTILISATION)
        read = 2 * model.touched_parameters(batch) + batch * context * model.kv_bytes
        reading = read / (gpus * gpu.bandwidth * MEMORY_UTILISATION)
        return max(arithmetic, reading) + STEP_OVERHEAD_SECONDS + hops

    return DecodeTable(
        _BATCHES,
        _CONTEXTS,
        tuple(tuple(step(batch, context) for context in _CONTEXTS) for batch in _BATCHES),
        2 * model.active_parameters / (gpus * gpu.flops * PREFILL_UTILISATION),
    )


def kv_tokens(model: ModelShape, gpu: Gpu, gpus: int) -> int:
    """Return the tokens that fit in the KV cache beside the weights.

    Raises:
        ValueError: if the weights leave no room; the message names the least number of GPUs.
    """
    usable = gpu.memory * (1 - RESERVED)
    room = gpus * usable - model.weight_bytes
    if room < 4096 * model.kv_bytes:
        least = next(n for n in (2**k for k in range(32)) if n * usable - model.weight_bytes >= 4096 * model.kv_bytes)
        raise ValueError(
            f"gpus is {gpus}: {model.name} needs {model.weight_bytes / 1e9:.0f} GB for its weights alone and does not"
            f" fit {gpus} × {gpu.name}; use at least {least}"
        )
    return int(room / model.kv_bytes)


def profile(
    model: ModelShape, gpu: Gpu, gpus: int, *, startup_seconds: float, table: DecodeTable | None = None
) -> InstanceProfile:
    """Return the profile of an instance of `gpus` GPUs that serves `model`, with the latency of `table` if given."""
    return InstanceProfile(
        latency=(table or roofline(model, gpu, gpus)).linear(),
        gpus=gpus,
        kv_tokens=kv_tokens(model, gpu, gpus),
        startup_seconds=startup_seconds,
        weight_load_seconds=model.weight_bytes / gpus / LOAD_BYTES_PER_SECOND,
    )
