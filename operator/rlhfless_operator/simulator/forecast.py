"""Before money is spent: what a step's generation will take and cost at several weights of cost against time."""

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless_operator.policy.latency import InstanceProfile
from rlhfless_operator.policy.loads import SampleLoad
from rlhfless_operator.policy.measured import MEASURED
from rlhfless_operator.policy.planning import Limits, Plan, Planner
from rlhfless_operator.policy.roofline import GPUS, ModelShape, profile
from rlhfless_operator.simulator.traces import LengthStatistics, generate

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)


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


def forecast(
    instance: InstanceProfile,
    lengths: LengthStatistics,
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    limits: Limits,
    instance_hour: Decimal,
    weights: Sequence[float] = WEIGHTS,
    seed: int = 0,
) -> dict[str, Any]:
    """Generation of a typical step, planned at each weight, and the front between time and cost.

    Args:
        lengths: what is expected of the responses.
        instance_hour: price of an instance for an hour.

    Returns:
        `{"plans": [{"cost_weight", "actors", "seconds", "instance_seconds", "lower_bound_instance_seconds", "cost"}],
        "front": [the same without "cost_weight"]}`; money is a decimal string.
    """
    trace = generate(lengths, epochs=1, prompts=prompts_per_step, samples=samples_per_prompt, seed=seed)
    samples = [
        SampleLoad(
            int(prompt), int(index), int(trace.prompt_tokens[prompt]), float(trace.response_tokens[0, prompt, index])
        )
        for prompt, index in np.ndindex(prompts_per_step, samples_per_prompt)
    ]
    planner = Planner(samples, instance.latency, limits, instance.startup_seconds + instance.weight_load_seconds)

    def row(plan: Plan) -> dict[str, Any]:
        hours = Decimal(repr(plan.expected_instance_seconds)) / 3600
        return {
            "actors": len(plan.shares),
            "seconds": plan.expected_seconds,
            "instance_seconds": plan.expected_instance_seconds,
            "lower_bound_instance_seconds": plan.lower_bound_instance_seconds,
            "cost": str((hours * instance_hour).quantize(Decimal("0.0001"))),
        }

    return {
        "plans": [{"cost_weight": weight, **row(planner.weighted(weight))} for weight in weights],
        "front": [row(plan) for plan in planner.front()],
    }
