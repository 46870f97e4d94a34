"""The size of live batches while samples wait, beside the size that they should have, by the engine's own counters.

    python benchmarks/asynchronous/occupancy.py [--engine emulated transformers] [--places 32] [--group 8] [--json FILE]

The driver's live actors have two instances on threads of this process, or one with vLLM, and more groups than places.
Counts begin once all batches have been full, and end with the last report before no group waits. `emulated` is a
Qwen2.5-3B on L40S with lengths like GSM8K's. `transformers` and `vllm` have a random model of 126 MB, whose responses
have up to 120 tokens; `vllm` needs `.venv-vllm/bin/python`.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.asynchronous.live_batches import Capacity
from benchmarks.asynchronous.live_batches import Instances as ThreadInstances
from benchmarks.shared.random_models import QWEN3_126_MB, publish_model, random_qwen3
from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import GSM8K_LENGTHS, job_on_l40s
from rlhfless_functions.api import (
    DecodeCounts,
    Event,
    GenerationRequest,
    NextWeights,
    Preload,
    Progress,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.data.prompts import Prompt, write_prompts
from rlhfless_functions.generation.engines.base import Engine, EngineRun, SequenceResult
from rlhfless_functions.generation.engines.emulated import EmulatedEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.settings import EngineSettings, ModelSettings, SamplingSettings
from rlhfless_operator.planner.moves.live_sizes import Batches
from rlhfless_operator.simulator.traces import generate as draw_trace
from rlhfless_operator.simulator.traces import write_trace
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.live_actor import Weights
from rlhfless_operator.training.actors.live_rollout import LiveRollout, LiveSettings
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.instances.instance_queue import InstanceQueue
from rlhfless_operator.training.requests.rehearsal import emulation_of
from rlhfless_operator.training.stages.live_actors import LiveActors

GROUPS = 48
PROMPT_TOKENS = 32


@dataclass
class Counted:
    """Reports of one instance: passes and sequences in them so far, and whether its batch was full."""

    reports: list[tuple[int, int, bool]] = field(default_factory=list)


class Instances(ThreadInstances):
    """Instances with an engine, whose reports are kept while groups wait."""

    def __init__(self, engines: list[Engine], places: int) -> None:
        self._free: asyncio.Queue[Instance] = asyncio.Queue()
        for number, engine in enumerate(engines):
            instance = Instance("generation", Generator(engine), name=f"i-{number}", started_at=time.time())
            instance.listening()
            self._free.put_nowait(instance)
        self._places = places
        self.counts = ThreadInstances(0, None).counts  # type: ignore[arg-type]
        self.counted: list[Counted] = []
        self.waits: Callable[[], bool] = lambda: True

    async def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        counted = Counted()
        self.counted.append(counted)
        async for event in super().run(request):
            if isinstance(event, Progress) and event.decoding.passes and self.waits():
                full = event.running >= self._places
                counted.reports.append((event.decoding.passes, event.decoding.sequence_passes, full))
            yield event


def engine_of(kind: str, folder: Path, group: int) -> tuple[Callable[[], Engine], ModelSettings, str, int]:
    """An engine, its model and weights, and the longest response."""
    if kind == "emulated":
        trace = draw_trace(GSM8K_LENGTHS, epochs=1, prompts=GROUPS, samples=group, seed=0)
        write_trace(folder / "trace.parquet", trace)
        emulation = emulation_of(job_on_l40s("occupancy", folder, prompts=GROUPS, steps=1, time_scale=0.25))
        assert emulation is not None
        # It counts passes if it may draft; no request asks for drafts.
        counts = emulation.model_copy(update={"draft_coverage": 0.5, "draft_acceptance": 0.5, "startup_seconds": 0.0})
        return lambda: EmulatedEngine(counts), ModelSettings(source="Qwen2.5-3B"), "w", GSM8K_LENGTHS.longest
    model = str(folder / "model")
    publish_model(Path(model), random_qwen3(configuration=QWEN3_126_MB))
    settings = ModelSettings(source=model, dtype="float32")
    if kind == "transformers":
        from rlhfless_functions.generation.engines.transformers import TransformersEngine

        return TransformersEngine, settings, model, 120
    from rlhfless_functions.generation.engines.vllm.engine import VllmEngine

    return lambda: counting(VllmEngine(EngineSettings(sequence_tokens=PROMPT_TOKENS + 120))), settings, model, 120


def counting(engine: Engine) -> Engine:
    """Let the runs of an engine that counts only tokens count its passes: each gives a sequence one token."""
    start = engine.start

    def started(*arguments: Any, **named: Any) -> EngineRun:
        run = start(*arguments, **named)
        step, passes = run.step, 0

        def counted_step() -> list[SequenceResult]:
            nonlocal passes
            before = run.computed.response
            results = step()
            passes += run.computed.response > before
            return results

        def decoding() -> DecodeCounts:
            tokens = run.computed.response
            return DecodeCounts(passes=passes, sequence_passes=tokens, tokens=tokens)

        run.step, run.decoding = counted_step, decoding  # type: ignore[method-assign]
        return run

    engine.start = started  # type: ignore[method-assign]
    return engine


async def occupancy(kind: str, places: int, group: int, folder: Path) -> dict[str, Any]:
    """Generate all groups; the mean size of batches while groups waited, beside the places."""
    make, model, uri, longest = engine_of(kind, folder, group)
    chance = np.random.default_rng(0)
    prompts = [Prompt(row=row, tokens=chance.integers(3, 60, PROMPT_TOKENS).tolist(), text="") for row in range(GROUPS)]
    write_prompts(str(folder / "prompts.parquet"), prompts)
    weights = WeightsReference(version=0, uri=uri)
    actors = 1 if kind == "vllm" else 2
    instances = Instances([make() for _ in range(actors)], places)

    def request(attempt: ActorAttempt) -> GenerationRequest:
        return GenerationRequest(
            key=TaskKey(job_uid="u", step=1, stage="generation", part=attempt.actor, attempt=attempt.number),
            result=f"{attempt.sink}/result.json",
            model=model,
            weights=weights,
            prompts=str(folder / "prompts.parquet"),
            samples=attempt.samples,
            sampling=SamplingSettings(max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=longest),
            seed=0,
            sink=attempt.sink,
            resume_from=attempt.resume_from,
            known_until=attempt.known_until,
        )

    use = Weights(
        upcoming=lambda present: [],
        source=lambda present: NextWeights(weights=present),
        preload=lambda present: Preload(model=model, weights=present),
        on_use=lambda started, version, size: None,
    )
    queue = InstanceQueue("generation", Capacity())  # type: ignore[arg-type]
    live = LiveActors(instances, queue, use, PROMPT_TOKENS)  # type: ignore[arg-type]
    instances.waits = lambda: live._waiting > 0
    settings = LiveSettings(
        step=1,
        sink_root=str(folder / "sinks"),
        driver=1,
        retries=0,
        weights=SamplingWeights(weights),
        make_request=request,
        on_event=lambda event: None,
    )
    groups = [[SampleTask(prompt=prompt, index=index) for index in range(group)] for prompt in range(GROUPS)]
    rollout = LiveRollout(groups, GenerationOutcome(sinks=[]), settings)
    async with live.generating(rollout, Batches(actors, places, places)):
        while await rollout.complete.get() is not None:
            pass
    if rollout.error is not None:
        raise rollout.error
    await live.close()
    passes = sequences = 0
    for each in instances.counted:
        since = next(number for number, (_, _, full) in enumerate(each.reports) if full)
        first, last = each.reports[since], each.reports[-1]
        passes, sequences = passes + last[0] - first[0], sequences + last[1] - first[1]
    size = sequences / passes
    return {
        "places": places,
        "group": group,
        "passes": passes,
        "size": round(size, 2),
        "share": round(size / places, 4),
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="The size of live batches while samples wait.")
    parser.add_argument("--engine", nargs="+", default=["emulated", "transformers"])
    parser.add_argument("--places", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {}
    for kind in given.engine:
        with tempfile.TemporaryDirectory(prefix="occupancy-") as name:
            found[kind] = asyncio.run(occupancy(kind, given.places, given.group, Path(name)))
        print(kind, found[kind], flush=True)
    write_record({**described_run(["torch", "transformers", "vllm"]), **found}, given.json)


if __name__ == "__main__":
    main()
