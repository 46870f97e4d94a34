"""Part of `gpu.py`: another version of the weights, published as the learner does and taken over by live engines."""

import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerator import device, model_dtype, now, timed
from attempts import attempt
from gpu_engines import engine_settings, live_engine, live_engines
from shapes import SHAPES, WORK, make_model, model_settings

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.artifacts.manifest import entries
from rlhfless_functions.device_memory import give_back
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import load_policy, publish_adapter, torch_dtype
from rlhfless_functions.weights.saving import write_model

LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_SECONDS = 2, 5, 15.0

Publisher = Callable[[Path], dict[str, float]]
"""Publishes a version, and says in how many seconds."""


def measure(name: str, model: Path, scratch: Path) -> dict[str, Any]:
    """All weights, and the adapter where the shape's step trains one; files go to and come from the page cache.

    Args:
        name: of the shape.
        model: its folder.
        scratch: for what is published.
    """
    published = scratch / "version"
    rank = WORK[name].lora_rank
    makers = {"all weights": (None, lambda: _all_weights(name))}
    if rank:
        makers["adapter"] = (rank, lambda: _adapter(model, rank))
    found = {}
    for kind, (lora_rank, maker) in makers.items():
        found[kind] = _publish(maker, published)
        give_back()
        settings = ModelSettings.model_validate(model_settings(model, model_dtype(), lora_rank))
        found[kind]["engines"] = {}
        for engine in live_engines():
            taking = partial(_take_over, engine, settings, published, found[kind])
            found[kind]["engines"][engine] = attempt(taking)
            give_back()
        shutil.rmtree(published)
    return found


def _publish(maker: Callable[[], Publisher], published: Path) -> dict[str, Any]:
    publisher = maker()

    def publish() -> dict[str, float]:
        shutil.rmtree(published, ignore_errors=True)
        return publisher(published)

    # What is made once, such as the configuration's files, is made the first time.
    rounds = _repeat(publish)
    manifest = artifacts.manifest(str(published))
    assert manifest is not None
    size = sum(entry.size for entry in manifest.files.values())
    medians = {part: statistics.median(each[part] for each in rounds) for part in rounds[0]}
    return {
        "bytes": size,
        "publish": medians | {"gigabytes_per_second": size / medians["seconds"] / 1e9, "rounds": rounds},
        "checksum_seconds": timed(lambda: entries(published, manifest.files)),
    }


def _take_over(name: str, model: ModelSettings, published: Path, version: dict[str, Any]) -> dict[str, Any]:
    """Take the published version into a live engine, time and again from the weights that it began with."""
    engine = live_engine(name, engine_settings(name, sequence_tokens=512))
    first = WeightsReference(version=0, uri=model.source)
    another = WeightsReference(version=1, uri=str(published))
    if model.lora is not None:
        another = WeightsReference(version=1, uri=model.source, adapter=str(published))
    started = timed(lambda: engine.load(model, first))

    def replace() -> dict[str, float]:
        taken = timed(lambda: engine.load(model, another))
        engine.load(model, first)
        return {"seconds": taken}

    rounds = [each["seconds"] for each in _repeat(replace)]
    median = statistics.median(rounds)
    if name == "vllm":
        engine.close()
    return {
        "start_seconds": started,
        "seconds": median,
        # vLLM takes tensors over while their checksums are compared, and not after that.
        "loading_seconds": None if name == "vllm" else median - version["checksum_seconds"],
        "gigabytes_per_second": version["bytes"] / median / 1e9,
        "rounds": rounds,
    }


def _all_weights(name: str) -> Publisher:
    """What `publish_weights` does with the learner's float32 weights on the device, with a clock in its middle."""
    dtype = torch_dtype(ModelSettings(source="unused", dtype=model_dtype()))
    policy = make_model(SHAPES[name], torch.float32, device(), seed=1)

    def publish(uri: Path) -> dict[str, float]:
        began = now()
        with artifacts.publish(str(uri)) as folder:
            write_model(policy, folder, dtype)
            written = now()
        ended = now()
        return {
            "seconds": ended - began,
            "write_seconds": written - began,
            "checksum_and_flush_seconds": ended - written,
        }

    return publish


def _adapter(model: Path, rank: int) -> Publisher:
    settings = ModelSettings.model_validate(model_settings(model, model_dtype(), rank))
    policy = load_policy(settings, WeightsReference(version=0, uri=str(model))).to(device())
    return lambda uri: {"seconds": timed(lambda: publish_adapter(str(uri), policy))}


def _repeat(action: Callable[[], dict[str, float]]) -> list[dict[str, float]]:
    """What the action says each time; large models have fewer rounds."""
    ends = now() + ROUNDS_SECONDS
    rounds = [action()]
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and now() < ends):
        rounds.append(action())
    return rounds
