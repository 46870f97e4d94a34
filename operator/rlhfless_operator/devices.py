"""What instances are like on GPUs that are named: the shape of the model, latency, memory, and the work of a step."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhfless_operator.policy.latency import InstanceProfile
from rlhfless_operator.policy.measured import MEASURED
from rlhfless_operator.policy.roofline import GPUS, MODELS, ModelShape, profile

LEARNING_UTILISATION = 0.35
"""Part of the peak arithmetic that forward and backward passes reach. Assumed."""
PREPARATION_UTILISATION = 0.5
"""Part of the peak arithmetic that forward passes over whole sequences reach. Assumed."""


def find_shape(source: str, field: str = "model.source") -> ModelShape:
    """The shape of a model: counted from its folder, or known by its name, such as `Qwen/Qwen2.5-7B-Instruct`.

    Args:
        field: what the model's name was given as, for the error.

    Raises:
        ValueError: for a name that is not known and a folder without a configuration.
    """
    if Path(source).is_dir():
        return read_model_shape(Path(source))
    name = source.rsplit("/", 1)[-1].lower()
    known = [shape for shape in MODELS.values() if name.startswith(shape.name.lower())]
    if not known:
        raise ValueError(
            f"{field} is {source!r}, which is no folder here: give the folder of a Hugging Face model, of which its"
            f" config.json is enough, or one of {', '.join(MODELS)}"
        )
    return known[0]


def read_model_shape(folder: Path) -> ModelShape:
    """What latency depends on, from a Hugging Face model's `config.json`.

    Raises:
        ValueError: if the file is missing or lacks a field of a dense decoder.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: give the folder of a Hugging Face model")
    return model_shape(folder.name, json.loads(path.read_text()))


def model_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape of a dense decoder with gated feed-forward layers, counted from its configuration."""
    fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    for field in fields:
        if field not in config:
            raise ValueError(f"{field} is not in the model's configuration: only dense decoders can be forecast")
    hidden, layers, heads, inner, vocabulary = (int(config[field]) for field in fields)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    layer = 2 * hidden * size * (heads + kv_heads) + 3 * hidden * inner
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelShape(name, float(layers * layer + embeddings), 2 * 2 * layers * kv_heads * size, layers)


def find_profile(
    model: ModelShape, gpu: str, gpus: int, *, startup_seconds: float, measured_as: str | None = None
) -> InstanceProfile:
    """An instance of a GPU by name; measured latencies where there are some.

    Args:
        measured_as: name of a measured model that this one is, such as `Qwen2.5-3B`.

    Raises:
        ValueError: for an unknown GPU, or a model that does not fit.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: choose one of {', '.join(GPUS)}")
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}: an instance has at least 1")
    table = MEASURED.get((gpu, measured_as or model.name, gpus))
    return profile(model, GPUS[gpu], gpus, startup_seconds=startup_seconds, table=table)


def is_measured(model: ModelShape, gpu: str, gpus: int) -> bool:
    """Whether latencies were measured, rather than computed from the data sheet."""
    return (gpu, model.name, gpus) in MEASURED


def preparation_token_seconds(model: ModelShape, gpu: str, gpus: int, passes: int) -> float:
    """Seconds of so many forward passes for each token."""
    return passes * 2 * model.parameters / (gpus * GPUS[gpu].flops * PREPARATION_UTILISATION)


def learning_token_seconds(model: ModelShape, gpu: str, gpus: int, models: int) -> float:
    """Seconds of the forward and backward passes of so many models for each token."""
    return models * 6 * model.parameters / (gpus * GPUS[gpu].flops * LEARNING_UTILISATION)
