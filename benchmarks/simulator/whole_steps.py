"""Whole steps in the simulator against real processes on emulated GPUs, with learning under the tail.

    python benchmarks/simulator/whole_steps.py [--actors 16] [--time-scale 1] [--json FILE]

The real side is a rehearsal with `learning.overlap: auto`; the learner has as many GPUs as there are actors. The
simulated side gets the driver's plans, prepares groups in the order in which they complete, and learns from them in the
order in which they are prepared. Both sides tell the seconds and the GPU-seconds of a step.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import GSM8K_LENGTHS
from benchmarks.simulator import against_processes as processes
from benchmarks.simulator.overlapped_learning import job_of
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.step.overlap import queue
from rlhfless_operator.simulator.traces import Trace, generate, write_trace
from rlhfless_operator.training.requests.rehearsal import emulation_of


def simulated(
    step: processes.ObservedStep, epoch: int, trace: Trace, emulation: EmulationSettings, job: RLHFJob, *, follows: bool
) -> tuple[float, float]:
    """Seconds and GPU-seconds of a whole step, in emulated seconds.

    Args:
        follows: whether the learner begins under the tail; of the first step of a run nothing is known, and it waits.
    """
    generation = processes.simulated(step, epoch, trace, emulation, job)
    prompts = sorted({prompt for prompt, _ in generation.ends})
    completed = np.array([max(at for key, at in generation.ends.items() if key[0] == prompt) for prompt in prompts])
    lengths = trace.response_tokens[epoch]
    tokens = np.array(
        [float(trace.samples * trace.prompt_tokens[prompt] + lengths[prompt].sum()) for prompt in prompts]
    )
    preparation, learning = tokens * emulation.preparation_token_seconds, tokens * emulation.learning_token_seconds
    prepared = queue(completed, preparation)
    learnt = queue(prepared, learning).max() if follows else prepared.max() + learning.sum()
    gpus = job.spec.learning.processes or 1
    work = preparation.sum() + gpus * (learning.sum() + emulation.update_seconds)
    return float(learnt) + emulation.update_seconds, generation.gpu_seconds + float(work)


def compare(actors: int, prompts: int, steps: int, time_scale: float) -> list[dict[str, Any]]:
    """A row for each step of a run."""
    trace = generate(GSM8K_LENGTHS, epochs=steps, prompts=prompts * actors, samples=8, seed=0)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        write_trace(folder / "trace.parquet", trace)
        # The simulated step has no other after it, for which instances could be kept.
        job = job_of("whole", folder, actors, prompts * actors, steps, "auto", time_scale, kl=0.001, keep_alive="0s")
        emulation = emulation_of(job)
        assert emulation is not None
        observed = asyncio.run(processes.rehearse(job, emulation, folder))
        records = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
        rows = []
        for epoch, (step, record) in enumerate(zip(observed, records, strict=True)):
            follows = "learning/beyond_preparation" in record["metrics"]
            seconds, gpu_seconds = simulated(step, epoch, trace, emulation, job, follows=follows)
            held = processes.observed(step, time_scale).gpu_seconds
            busy = {stage: record["ledger"][stage]["busy"] / time_scale for stage in ("preparation", "learning")}
            real = record["seconds"] / time_scale
            real_gpu_seconds = held + busy["preparation"] + (job.spec.learning.processes or 1) * busy["learning"]
            rows.append(
                {
                    "actors": actors,
                    "step": epoch + 1,
                    "follows": follows,
                    "seconds": real,
                    "simulated_seconds": seconds,
                    "seconds_error": seconds / real - 1,
                    "gpu_seconds": real_gpu_seconds,
                    "simulated_gpu_seconds": gpu_seconds,
                    "gpu_seconds_error": gpu_seconds / real_gpu_seconds - 1,
                    "beyond_preparation": record["metrics"].get("learning/beyond_preparation", 0.0) / time_scale,
                    "moved": step.outcome.moved,
                }
            )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each step."""
    for row in rows:
        print(
            f"{row['actors']} actors, step {row['step']}: {row['seconds']:.1f} s (simulated"
            f" {row['seconds_error']:+.1%}), {row['gpu_seconds']:,.0f} GPU-seconds ({row['gpu_seconds_error']:+.1%}),"
            f" beyond preparation {row['beyond_preparation']:.2f} s{'' if row['follows'] else ' (did not follow)'}",
            flush=True,
        )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Whole steps: the simulator against real processes.")
    parser.add_argument("--actors", type=int, nargs="+", default=[16])
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step for each actor")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds here for each emulated second")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for actors in arguments.actors:
        rows += compare(actors, arguments.prompts, arguments.steps, arguments.time_scale)
        show(rows[-arguments.steps :])
    mean = statistics.fmean(each["beyond_preparation"] for each in rows if each["follows"])
    about = {"time_scale": arguments.time_scale, "mean_beyond_preparation": mean}
    write_record({**described_run(["rlhfless"]), **about, "steps": rows}, arguments.json)


if __name__ == "__main__":
    main()
