"""Part of `measure.py`: tokens a second of decoding, by the number of sequences that decode together."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.accelerator import model_dtype, now
from benchmarks.gpu.attempts import attempt
from benchmarks.gpu.engines import live_engine, live_engines
from benchmarks.gpu.shapes import SHAPES
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.runtime.device_memory import give_back
from rlhfless_functions.settings import EngineName, EngineSampling, EngineSettings, ModelSettings, VllmSettings

BATCHES = (1, 8, 32, 128, 256, 512, 1024)
PROMPT_TOKENS = 64
RESPONSE_TOKENS = 64


def measure(name: str, model: Path) -> dict[str, Any]:
    """Each engine that there is, as a job starts it; the most sequences on a CPU are 8.

    Args:
        name: of the shape.
        model: its folder.
    """
    batches = BATCHES if torch.cuda.is_available() else BATCHES[:2]
    found = {}
    # vLLM comes last: it may keep memory for as long as its process lives.
    for engine in live_engines():
        found[engine] = attempt(partial(_engine, engine, model, SHAPES[name].vocabulary, batches))
        give_back()
    return {"engines": found}


def _engine(name: EngineName, folder: Path, vocabulary: int, batches: tuple[int, ...]) -> dict[str, Any]:
    settings = EngineSettings(
        name=name, sequence_tokens=PROMPT_TOKENS + RESPONSE_TOKENS, vllm=VllmSettings(gpu_memory_utilization=0.85)
    )
    engine = live_engine(name, settings)
    began = now()
    engine.load(ModelSettings(source=str(folder), dtype=model_dtype()), WeightsReference(version=0, uri=str(folder)))
    started = now() - began
    speeds: dict[str, float] = {}
    for batch in batches:
        tokens_per_second = _speed(engine, batch, vocabulary)
        if tokens_per_second is None:
            break
        speeds[str(batch)] = tokens_per_second
    room = engine.start(_tasks(1, vocabulary), EngineSampling(max_response_tokens=1), None).room
    return {"start_seconds": started, "room": room.model_dump(), "tokens_per_second": speeds}


def _speed(engine: Any, batch: int, vocabulary: int) -> float | None:
    """Tokens a second from when all sequences have their first token; None if they do not all decode together."""
    sampling = EngineSampling(max_response_tokens=RESPONSE_TOKENS)
    run = engine.start(_tasks(batch, vocabulary), sampling, None)
    if run.room.sequences < batch:
        return None
    ended = 0
    while len(lengths := run.lengths()) + ended < batch or any(tokens == 0 for *_, tokens in lengths):
        ended += len(run.step())
    before, began = run.computed.response, now()
    while run.running or run.waiting:
        run.step()
    return float((run.computed.response - before) / (now() - began))


def _tasks(count: int, vocabulary: int) -> list[SequenceTask]:
    return [
        SequenceTask(row, 0, [2 + (row * 7919 + place) % (vocabulary - 2) for place in range(PROMPT_TOKENS)], seed=row)
        for row in range(count)
    ]
