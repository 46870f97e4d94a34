"""Part of `measure.py`: another version of the weights, published as by the learner and taken over by live engines."""

import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.accelerator import device, model_dtype, now, timed
from benchmarks.gpu.attempts import attempt
from benchmarks.gpu.engines import engine_settings, live_engine, live_engines
from benchmarks.gpu.shapes import SHAPES, make_model, model_settings
from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.artifacts.manifest import damaged
from rlhfless_functions.runtime.device_memory import give_back
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import torch_dtype
from rlhfless_functions.weights.saving import write_model

MOST_ROUNDS, ROUNDS_SECONDS = 5, 8.0


def measure(name: str, model: Path, scratch: Path) -> dict[str, Any]:
    """Measure all weights, also of a shape whose step trains an adapter (`weights/lora.py` measures adapters).

    Files go to the page cache and come from there.

    Args:
        name: of the shape.
        model: its folder.
        scratch: for what is published.
    """
    published = scratch / "version"
    found = _publish(name, published)
    give_back()
    settings = ModelSettings.model_validate(model_settings(model, model_dtype(), None))
    found["engines"] = {}
    for engine in live_engines():
        found["engines"][engine] = attempt(partial(_take_over, engine, settings, published, found))
        give_back()
    return found


def _publish(name: str, published: Path) -> dict[str, Any]:
    """What `publish_weights` does with the learner's float32 weights on the device, with a clock in its middle."""
    dtype = torch_dtype(ModelSettings(source="unused", dtype=model_dtype()))
    policy = make_model(SHAPES[name], torch.float32, device(), seed=1)

    def publish() -> dict[str, float]:
        shutil.rmtree(published, ignore_errors=True)
        began = now()
        with artifacts.publishing(str(published)) as publication:
            write_model(policy, publication.folder, dtype, finish=publication.finish)
            written = now()
        ended = now()
        return {
            "seconds": ended - began,
            "write_seconds": written - began,
            "checksum_and_flush_seconds": ended - written,
        }

    # What is made once, such as the configuration's files, is made the first time.
    rounds = _repeat(publish)
    manifest = artifacts.manifest(str(published))
    assert manifest is not None
    size = sum(entry.size for entry in manifest.files.values())
    medians = {part: statistics.median(each[part] for each in rounds) for part in rounds[0]}
    return {
        "bytes": size,
        "publish": medians | {"gigabytes_per_second": size / medians["seconds"] / 1e9, "rounds": rounds},
        "checksum_seconds": timed(lambda: damaged(published, manifest.files)),
    }


def _take_over(name: str, model: ModelSettings, published: Path, version: dict[str, Any]) -> dict[str, Any]:
    """Take the published version into a live engine, time and again from the weights that it began with."""
    engine = live_engine(name, engine_settings(name, sequence_tokens=512))
    first = WeightsReference(version=0, uri=model.source)
    another = WeightsReference(version=1, uri=str(published))
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


def _repeat(action: Callable[[], dict[str, float]]) -> list[dict[str, float]]:
    """What the action says each time; large models have fewer rounds."""
    ends = now() + ROUNDS_SECONDS
    rounds = [action()]
    while len(rounds) < MOST_ROUNDS and now() < ends:
        rounds.append(action())
    return rounds
