"""Instances on named GPUs: the shape of the model, latency, memory, and the stages' seconds for each token."""

from collections.abc import Mapping
from typing import Any

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.latency.measured import MEASURED
from rlhfless_operator.planner.latency.roofline import GPUS, HOST_UTILISATION, ModelShape, profile

LEARNING_UTILISATION = 0.35
"""Part of the peak arithmetic that forward and backward passes reach. Assumed."""
PREPARATION_UTILISATION = 0.5
"""Part of the peak arithmetic that forward passes over whole sequences reach. Assumed."""

STATE_BYTES = 12
"""Bytes of the learner's state for each trained parameter: weights and AdamW's moments in float32."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def model_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a dense decoder with gated feed-forward layers, counted from its configuration.

    Keys and values count for every token of the context, also in layers whose attention has a window.

    Raises:
        ValueError: it is another kind of model, or its configuration is incomplete.
    """
    config = config.get("text_config") or config
    experts = next((field for field in _EXPERTS if config.get(field)), None)
    if experts is not None:
        raise ValueError(f"{name} has {config[experts]} experts ({experts}): only dense decoders can be forecast")
    fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    for field in fields:
        if field not in config:
            raise ValueError(f"{field} is not in the model's configuration: only dense decoders can be forecast")
    hidden, layers, heads, inner, vocabulary = (int(config[field]) for field in fields)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    layer = 2 * hidden * size * (heads + kv_heads) + 3 * hidden * inner
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", _is_gemma(config)) else 2)
    return ModelShape(name, float(layers * layer + embeddings), 2 * 2 * layers * kv_heads * size, layers)


def _is_gemma(config: Mapping[str, Any]) -> bool:
    """Return whether the model is of a family whose configurations leave out that embeddings are always tied."""
    return str(config.get("model_type", "")).startswith("gemma")


def find_profile(model: ModelShape, gpu: str, gpus: int, *, startup_seconds: float) -> InstanceProfile:
    """Return the profile of an instance with GPUs of this name, with measured latencies if there are any.

    Raises:
        ValueError: for an unknown GPU, or a model that does not fit.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: choose one of {', '.join(GPUS)}")
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}: an instance has at least 1")
    table = MEASURED.get((gpu, model.name, gpus))
    return profile(model, GPUS[gpu], gpus, startup_seconds=startup_seconds, table=table)


def is_measured(model: ModelShape, gpu: str, gpus: int) -> bool:
    """Return whether latencies were measured, rather than computed from the data sheet."""
    return (gpu, model.name, gpus) in MEASURED


def preparation_token_seconds(model: ModelShape, gpu: str, gpus: int, passes: int) -> float:
    """Return the seconds of `passes` forward passes for each token."""
    return passes * 2 * model.parameters / (gpus * GPUS[gpu].flops * PREPARATION_UTILISATION)


def learning_token_seconds(model: ModelShape, gpu: str, gpus: int, passes: float) -> float:
    """Return the seconds of `passes` forward and backward passes for each token; a forward pass alone is a third."""
    return passes * 6 * model.parameters / (gpus * GPUS[gpu].flops * LEARNING_UTILISATION)


def state_move_seconds(model: ModelShape, gpu: str, gpus: int) -> float:
    """Return the seconds to copy the learner's state from its GPUs to the host's memory, or back."""
    return STATE_BYTES * model.parameters / (gpus * GPUS[gpu].host_bandwidth * HOST_UTILISATION)
