"""Instances on named GPUs: the shape of the model, latency, memory, and the stages' seconds for each token."""

from collections.abc import Mapping
from typing import Any

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.latency.measured import MEASURED
from rlhfless_operator.planner.latency.roofline import GPUS, HOST_UTILISATION, Layer, ModelShape, profile

LEARNING_UTILISATION = 0.35
"""Part of the peak arithmetic that forward and backward passes reach. Assumed."""
PREPARATION_UTILISATION = 0.5
"""Part of the peak arithmetic that forward passes over whole sequences reach. Assumed."""

STATE_BYTES = 12
"""Bytes of the learner's state for each trained parameter: weights and AdamW's moments in float32."""

WEIGHT_BYTES = 2
"""Bytes of published weights for each parameter: bfloat16."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def model_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a decoder with gated feed-forward layers, or experts of such layers, by its configuration.

    Keys and values count for every token of the context, also in layers whose attention has a window.

    Raises:
        ValueError: it is another kind of model, or its configuration is incomplete.
    """
    config = config.get("text_config") or config
    for wanted in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        if wanted not in config:
            raise ValueError(f"{wanted} is not in the model's configuration: only decoders can be forecast")
    hidden, heads, vocabulary = (int(config[each]) for each in ("hidden_size", "num_attention_heads", "vocab_size"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    experts, chosen, wide, beside = _feed_forward(name, config)
    in_experts = 3 * hidden * wide * experts
    in_layer = 2 * hidden * size * (heads + kv_heads) + hidden * (experts + 3 * beside) + in_experts
    layers, tied = int(config["num_hidden_layers"]), bool(config.get("tie_word_embeddings", _is_gemma(config)))
    layer = Layer(
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        query=heads * size,
        key=kv_heads * size,
        inner=chosen * wide + beside,
        parameters=float(in_layer),
        tied=tied,
        expert_parameters=float(in_experts),
        experts=experts,
        chosen=chosen,
    )
    parameters = layers * layer.parameters + layer.embedding * (1 if tied else 2)
    return ModelShape(name, parameters, 2 * 2 * layers * layer.key, layers, layer)


def _feed_forward(name: str, config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return a layer's experts, those that a token passes, the width of one, and the width beside them.

    Raises:
        ValueError: the layers are not alike, or their attention compresses keys and values.
    """
    experts = next((int(config[each]) for each in _EXPERTS if config.get(each)), 0)
    if not experts:
        return 0, 0, 0, int(config["intermediate_size"])
    if config.get("kv_lora_rank"):
        raise ValueError(f"{name} compresses keys and values (kv_lora_rank): such attention can't be forecast")
    dense = next((each for each in ("mlp_only_layers", "first_k_dense_replace") if config.get(each)), None)
    if dense is not None or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"{name} has layers without experts ({dense or 'decoder_sparse_step'}): they can't be forecast"
        )
    if "num_experts_per_tok" not in config:
        raise ValueError(f"num_experts_per_tok is not in the configuration of {name}, which has {experts} experts")
    wide = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    beside = int(config.get("shared_expert_intermediate_size") or config.get("n_shared_experts", 0) * wide)
    return experts, int(config["num_experts_per_tok"]), wide, beside


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
    return passes * 2 * model.active_parameters / (gpus * GPUS[gpu].flops * PREPARATION_UTILISATION)


def learning_token_seconds(model: ModelShape, gpu: str, gpus: int, passes: float) -> float:
    """Return the seconds of `passes` forward and backward passes for each token; a forward pass alone is a third."""
    return passes * 6 * model.active_parameters / (gpus * GPUS[gpu].flops * LEARNING_UTILISATION)


def state_move_seconds(model: ModelShape, gpu: str, gpus: int) -> float:
    """Return the seconds to copy the learner's state from its GPUs to the host's memory, or back."""
    return STATE_BYTES * model.parameters / (gpus * GPUS[gpu].host_bandwidth * HOST_UTILISATION)
