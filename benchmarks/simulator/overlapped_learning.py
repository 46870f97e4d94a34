"""Learning under the tail, rehearsed: the whole loop with real processes on emulated GPUs, each way to overlap.

    python benchmarks/simulator/overlapped_learning.py [--actors 16] [--time-scale 1] [--steps 4]
        [--overlap never auto]

The job has Qwen2.5-3B on L40S, lengths like GSM8K's, and prompts × 8 samples. The learner has as many GPUs as there are
actors. Printed are the means of the steps after the first, in emulated seconds.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import GSM8K_LENGTHS, job_on_l40s
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.local_run import run_locally
from rlhfless_operator.simulator.traces import generate, write_trace


def job_of(
    name: str,
    folder: Path,
    actors: int,
    prompts: int,
    steps: int,
    overlap: str,
    time_scale: float,
    *,
    kl: float = 0.0,
    keep_alive: str | None = None,
) -> RLHFJob:
    """A rehearsal of a job whose steps all have the same prompts.

    Args:
        kl: coefficient; above 0 preparation asks the reference policy, and else it has next to nothing to do.
        keep_alive: of generation instances.
    """
    return job_on_l40s(
        name,
        folder,
        prompts=prompts,
        steps=steps,
        time_scale=time_scale,
        algorithm={"kl": {"coefficient": kl}},
        generation={"instances": {"min": 1, "max": actors}, "keepAlive": keep_alive},
        learning={"overlap": overlap, "processes": actors},
    )


def rehearse(folder: Path, overlap: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A run; the means of its steps after the first."""
    prompts = arguments.prompts * arguments.actors
    job = job_of(overlap, folder, arguments.actors, prompts, arguments.steps, overlap, arguments.time_scale)
    root = folder / overlap
    asyncio.run(run_locally(job, str(root), threads=1))
    steps = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()][1:]
    scale = arguments.time_scale

    def mean(name: str) -> float:
        return statistics.fmean(step["metrics"].get(name, 0.0) for step in steps) / scale

    def held(state: str) -> float:
        return statistics.fmean(step["ledger"].get("learning", {}).get(state, 0.0) for step in steps) / scale

    beyond = [step["metrics"].get("learning/beyond_preparation", step["metrics"]["seconds"]) / scale for step in steps]
    return {
        "overlap": overlap,
        "actors": arguments.actors,
        "seconds": statistics.fmean(step["seconds"] for step in steps) / scale,
        "generation_seconds": mean("generation/seconds"),
        "learning_seconds": mean("seconds/train"),
        "beyond_preparation": statistics.fmean(beyond),
        "most_beyond_preparation": max(beyond),
        "learner_busy": held("busy"),
        "learner_idle": held("idle"),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Learning under the tail, rehearsed.")
    parser.add_argument("--actors", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step for each actor")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds here for each emulated second")
    parser.add_argument("--overlap", nargs="+", default=["never", "auto"])
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    arguments = parser.parse_args()
    rows = []
    for overlap in arguments.overlap:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
            folder = Path(name)
            trace = generate(
                GSM8K_LENGTHS, epochs=arguments.steps, prompts=arguments.prompts * arguments.actors, samples=8, seed=0
            )
            write_trace(folder / "trace.parquet", trace)
            rows.append(rehearse(folder, overlap, arguments))
        print(", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    about = {"time_scale": arguments.time_scale, "steps_of_a_run": arguments.steps}
    write_record({**described_run(["rlhfless"]), **about, "runs": rows}, arguments.json)


if __name__ == "__main__":
    main()
