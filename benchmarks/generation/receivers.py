"""What an actor that receives moved samples pays for them: the time between two passes.

    python benchmarks/generation/receivers.py [--moves 60] [--samples 4] [--engine emulated transformers] [--json FILE]

One actor decodes a batch. Another one has stopped its samples in mid-response and published their tokens. Lines add
these to the running batch, a few at a time, as a move does. Its passes go on while the tokens are read from the store.
Printed are the pauses between the end of a pass and the beginning of the next one: those in which samples joined, and
all others. Computing the contexts of the moved samples is part of a pass, and not of a pause.

`emulated` is a Qwen2.5-3B on L40S in a rehearsal, with responses of up to 2,048 tokens. `transformers` is a random
model of 126 MB on a CPU, with responses of up to 256 tokens.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.random_models import publish_model, random_qwen3
from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import job_on_l40s
from rlhfless_functions.api import (
    AddSamples,
    Event,
    GenerationRequest,
    LiveBatch,
    Progress,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.data.prompts import Prompt, write_prompts
from rlhfless_functions.data.traces import TraceRows, write_trace_rows
from rlhfless_functions.generation.engines.base import Engine, EngineRun, SequenceResult
from rlhfless_functions.generation.engines.emulated import EmulatedEngine
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.inbox import Inbox
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.settings import ModelSettings, SamplingSettings
from rlhfless_operator.training.requests.rehearsal import emulation_of

PROMPT_TOKENS, OWN_SAMPLES = 64, 16
LONGEST = {"emulated": 2048, "transformers": 256}


def timed(engine: Engine, pauses: list[tuple[float, bool]]) -> Engine:
    """Let the runs of an engine note the seconds between two passes, and whether samples were added in them."""
    start = engine.start

    def started(*arguments: Any, **named: Any) -> EngineRun:
        run = start(*arguments, **named)
        step, add = run.step, run.add
        ended, joined = None, False

        def timed_add(*arguments: Any, **named: Any) -> None:
            nonlocal joined
            joined = True
            add(*arguments, **named)

        def timed_step() -> list[SequenceResult]:
            nonlocal ended, joined
            if ended is not None:
                pauses.append((time.perf_counter() - ended, joined))
            joined = False
            try:
                return step()
            finally:
                ended = time.perf_counter()

        run.step, run.add = timed_step, timed_add  # type: ignore[method-assign]
        return run

    engine.start = started  # type: ignore[method-assign]
    return engine


class Workload:
    """A store with prompts, and requests for their samples."""

    def __init__(self, folder: Path, kind: str, prompts: int) -> None:
        self.folder, self.longest = folder, LONGEST[kind]
        rows = [
            Prompt(row=row, tokens=[3 + (row + each) % 50 for each in range(PROMPT_TOKENS)], text="")
            for row in range(prompts)
        ]
        write_prompts(str(folder / "prompts.parquet"), rows)
        if kind == "emulated":
            trace = str(folder / "trace.parquet")
            row = np.arange(prompts)
            nothing = np.zeros_like(row)
            write_trace_rows(trace, TraceRows(row, nothing, nothing, nothing + PROMPT_TOKENS, nothing + self.longest))
            emulation = emulation_of(job_on_l40s("receivers", folder, prompts=prompts, steps=1, time_scale=1.0))
            assert emulation is not None
            changes = {"startup_seconds": 0.0, "weight_load_seconds": 0.0}
            self.make: Callable[[], Engine] = lambda: EmulatedEngine(emulation.model_copy(update=changes))
            self.model, uri = ModelSettings(source="Qwen2.5-3B"), "w"
        else:
            uri = str(folder / "model")
            publish_model(Path(uri), random_qwen3())
            self.make, self.model = TransformersEngine, ModelSettings(source=uri, dtype="float32")
        self.weights = WeightsReference(version=0, uri=uri)

    def request(self, sink: str, samples: Sequence[SampleTask], live: LiveBatch) -> GenerationRequest:
        place = str(self.folder / sink)
        return GenerationRequest(
            key=TaskKey(job_uid="u", step=1, stage="generation", part=sink, attempt=1),
            result=f"{place}/result.json",
            model=self.model,
            weights=self.weights,
            prompts=str(self.folder / "prompts.parquet"),
            samples=list(samples),
            sampling=SamplingSettings(max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=self.longest),
            seed=0,
            sink=place,
            live=live,
            progress_seconds=0.1,
        )


def run(kind: str, moves: int, samples: int) -> list[tuple[float, bool]]:
    """Move samples into a batch that decodes; its pauses, and whether samples joined in each."""
    with tempfile.TemporaryDirectory(prefix="receivers-") as name:
        prompts = OWN_SAMPLES + moves * samples
        work, pauses = Workload(Path(name), kind, prompts), list[tuple[float, bool]]()
        every = [SampleTask(prompt=prompt, index=0) for prompt in range(prompts)]
        own, moved = every[:OWN_SAMPLES], every[OWN_SAMPLES:]
        live = LiveBatch(sequences=256, prompt_tokens=PROMPT_TOKENS)
        # The source, until all of its samples have some tokens. It is cut, and publishes them.
        inbox, source = (
            Inbox(),
            work.request("source", moved, LiveBatch(sequences=len(moved), prompt_tokens=PROMPT_TOKENS)),
        )

        def cut(event: Event) -> None:
            if isinstance(event, Progress) and event.tokens > 20 * len(moved):
                cutting.stop("cut")

        cutting = TaskContext(emit=cut, inbox=inbox)
        Generator(work.make()).run(source, cutting)
        inbox, begun, received = Inbox(), threading.Event(), [0]

        def hear(event: Event) -> None:
            if isinstance(event, Progress):
                received[0] = event.received or 0
                begun.set()

        request = work.request("receiver", own, live)

        def send() -> None:
            begun.wait()
            for move in range(moves):
                share = moved[move * samples : (move + 1) * samples]
                inbox.put(AddSamples(sink=request.sink, samples=share, resume_from=[source.sink]))
                until = time.monotonic() + 5
                while received[0] < OWN_SAMPLES + (move + 1) * samples and time.monotonic() < until:
                    time.sleep(0.01)
            context.stop("cut")

        context = TaskContext(emit=hear, inbox=inbox)
        sender = threading.Thread(target=send)
        sender.start()
        Generator(timed(work.make(), pauses)).run(request, context)
        sender.join()
        assert received[0] == prompts, f"{received[0]} of {prompts} samples have joined"
        return pauses


def summarize(pauses: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Milliseconds of the pauses with and without samples that join."""
    found: dict[str, Any] = {}
    for name, joined in (("joins", True), ("others", False)):
        those = sorted(1000 * seconds for seconds, each in pauses if each is joined)
        found[name] = {
            "pauses": len(those),
            "median_ms": round(statistics.median(those), 2),
            "p95_ms": round(those[int(0.95 * (len(those) - 1))], 2),
            "most_ms": round(those[-1], 2),
        }
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="The pauses of an actor that receives moved samples.")
    parser.add_argument("--moves", type=int, default=60)
    parser.add_argument("--samples", type=int, default=4, help="of a move")
    parser.add_argument("--engine", nargs="+", choices=list(LONGEST), default=list(LONGEST))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {kind: summarize(run(kind, given.moves, given.samples)) for kind in given.engine}
    for kind, result in found.items():
        print(kind, result)
    write_record(
        {**described_run(["torch", "transformers"]), "moves": given.moves, "samples": given.samples, **found},
        given.json,
    )


if __name__ == "__main__":
    main()
