"""Runs of the emulated engine on a clock that passes only while somebody sleeps."""

import random

import numpy as np

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.data.traces import TraceRows, write_trace_rows
from rlhfless_functions.generation.engines.base import SequenceResult, SequenceTask
from rlhfless_functions.generation.engines.emulated import EmulatedBatch, EmulatedEngine
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.settings import ModelSettings, SamplingSettings
from rlhfless_functions.settings.emulation import EmulationSettings

MODEL = ModelSettings(source="nothing")
SAMPLING = SamplingSettings(max_prompt_tokens=64, max_response_tokens=24)
PROMPTS, SAMPLES, EPOCHS = 8, 3, 2


def wanted(epoch: int, prompt: int, sample: int) -> int:
    """Lengths of one to thirty tokens; those above the longest response are truncated."""
    return random.Random(f"{epoch}/{prompt}/{sample}").randint(1, 30)


def write_lengths(uri: str) -> None:
    """Write the trace of `wanted`."""
    epoch, prompt, sample = np.indices((EPOCHS, PROMPTS, SAMPLES)).reshape(3, -1)
    lengths = [wanted(*key) for key in zip(epoch.tolist(), prompt.tolist(), sample.tolist(), strict=True)]
    write_trace_rows(uri, TraceRows(prompt, epoch, sample, prompt + 1, np.array(lengths)))


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def emulation(trace: str, **changes: float) -> EmulationSettings:
    numbers: dict[str, float] = {
        "step_seconds": 1.0,
        "sequence_seconds": 0.25,
        "context_seconds": 0.5,
        "prefill_token_seconds": 0.0,
    }
    return EmulationSettings(trace=trace, prompts_per_step=PROMPTS, kv_tokens=10_000, **numbers | changes)


def engine_of(trace: str, version: int = 0, **changes: float) -> tuple[EmulatedEngine, Clock]:
    clock = Clock()
    engine = EmulatedEngine(emulation(trace, **changes), clock=clock, sleep=clock.sleep)
    engine.load(MODEL, WeightsReference(version=version, uri="w"))
    return engine, clock


def share(prompts: int = PROMPTS, samples: int = SAMPLES) -> list[SequenceTask]:
    return [
        SequenceTask(prompt, index, [7] * (prompt + 1), sample_seed(0, "training", 1, prompt, index))
        for prompt in range(prompts)
        for index in range(samples)
    ]


def finish(run: EmulatedBatch) -> dict[tuple[int, int], SequenceResult]:
    results = {}
    while run.running or run.waiting:
        results |= {(result.prompt, result.index): result for result in run.step()}
    return results


def continued(tasks: list[SequenceTask], partials: list[SequenceResult]) -> list[SequenceTask]:
    known = {(each.prompt, each.index): each for each in partials}
    return [
        SequenceTask(each.prompt, each.index, each.prompt_tokens, each.seed, partial.response_tokens, partial.log_probs)
        if (partial := known.get((each.prompt, each.index)))
        else each
        for each in tasks
    ]
