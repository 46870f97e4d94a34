"""Synchronous against asynchronous training, rehearsed: the whole loop with real processes on emulated GPUs.

    python benchmarks/asynchronous/against_synchronous.py --json FILE [--gpus 8] [--learner-gpus 2]
        [--steps 6] [--time-scale 1]

The job has Qwen2.5-3B on L40S, lengths like GSM8K's, and prompts × 8 samples. Every arm has `--gpus` GPUs. Where they
are split, `--learner-gpus` of them learn and the others generate, one GPU an actor:

    colocated   synchronous; all GPUs generate, then all learn, and changing over costs nothing
    cost        the same, and the `cost` policy chooses how many of them generate
    static      synchronous, split
    async-1     `async.maxStaleness: 1`, split
    async-2     `async.maxStaleness: 2`, split
    async-1-switch, async-2-keep
                with `newWeights: switch` and `tooStale: downweight`, the second also with `kvCache: keep`
    async-2-repack, async-2-none
                the same with `migration.policy: repack` (Laminar's) and `none` in the place of `benefit`

Means are of steps in the middle, in emulated seconds. Idle shares are of all GPUs of a stage, for as long as the steps
took. `owned_gpu_seconds` counts all GPUs for that long. `charged_gpu_seconds` is the ledger's, which charges an
instance while it is kept: also the one of preparation, a GPU beyond `--gpus`, and both stages' where stages share GPUs.
`expected_generation_seconds` is the plan's forecast. If `generation_seconds` is much more, the machine was too busy for
this time scale.

An arm that FILE has with the same settings does not run again.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.machine import describe_machine
from benchmarks.shared.records import write_record
from benchmarks.shared.rehearsed_jobs import GSM8K_LENGTHS, job_on_l40s
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.local_run import run_locally
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.simulator.traces import generate, write_trace

ENDS = 2
"""Steps that are left out at each end: instances start in the first, and beside the last less is generated."""
COLOCATED = ("colocated", "cost")
ARMS: dict[str, dict[str, Any]] = {
    "colocated": {"planning": {"policy": "even"}},
    "cost": {"planning": {"policy": "cost"}},
    "static": {"planning": {"policy": "even"}},
    "async-1": {"planning": {"policy": "even"}, "async": {"maxStaleness": 1}},
    "async-2": {"planning": {"policy": "even"}, "async": {"maxStaleness": 2}},
    "async-1-switch": {
        "planning": {"policy": "even"},
        "async": {"maxStaleness": 1, "newWeights": "switch", "tooStale": "downweight"},
    },
    "async-2-keep": {
        "planning": {"policy": "even"},
        "async": {"maxStaleness": 2, "newWeights": "switch", "kvCache": "keep", "tooStale": "downweight"},
    },
    "async-2-repack": {
        "planning": {"policy": "even", "migration": {"policy": "repack"}},
        "async": {"maxStaleness": 2},
    },
    "async-2-none": {
        "planning": {"policy": "even", "migration": {"policy": "none"}},
        "async": {"maxStaleness": 2},
    },
}


def split_of(arm: str, arguments: argparse.Namespace) -> tuple[int, int]:
    """GPUs that generate and GPUs that learn."""
    if arm in COLOCATED:
        return arguments.gpus, arguments.gpus
    return arguments.gpus - arguments.learner_gpus, arguments.learner_gpus


def job_of(arm: str, folder: Path, arguments: argparse.Namespace) -> RLHFJob:
    """A rehearsal of an arm, whose steps all have the same prompts."""
    actors, learner_gpus = split_of(arm, arguments)
    least = 1 if arm == "cost" else actors
    return job_on_l40s(
        arm,
        folder,
        prompts=arguments.prompts * arguments.gpus,
        steps=arguments.steps,
        time_scale=arguments.time_scale,
        algorithm={"kl": {"coefficient": 0.0}},
        generation={"instances": {"min": least, "max": actors}, "keepAlive": arguments.keep_alive},
        learning={"overlap": "never", "processes": learner_gpus, "keepAlive": arguments.keep_alive},
        **ARMS[arm],
    )


def rehearse(arm: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run an arm; the means of its steady steps."""
    root = folder / arm
    asyncio.run(run_locally(job_of(arm, folder, arguments), str(root), threads=1))
    lines = (root / "metrics.jsonl").read_text().splitlines()
    records = [StepRecord.model_validate_json(line) for line in lines]
    return {
        "arm": arm,
        **summarize(records[ENDS:-ENDS], arguments.time_scale, split_of(arm, arguments), arguments.gpus),
    }


def summarize(steps: list[StepRecord], scale: float, split: tuple[int, int], gpus: int) -> dict[str, Any]:
    """Rates and idle shares of steps, in emulated seconds."""
    actors, learner_gpus = split
    seconds = sum(step.seconds for step in steps) / scale

    def held(stage: str, state: str = "seconds") -> float:
        accounts = [step.ledger[stage] for step in steps if stage in step.ledger]
        return sum(float(getattr(account, state)) for account in accounts) / scale

    charged = held("generation") + held("preparation") + learner_gpus * held("learning")
    stale = [step.metrics.get("generation/staleness", 0.0) for step in steps]
    # A step of an asynchronous job tells of the rollouts that became complete since the one before, which may be none.
    generated = [step.metrics for step in steps if "generation/seconds" in step.metrics]
    return {
        "steps": len(steps),
        "step_seconds": seconds / len(steps),
        "steps_an_hour": 3600 * len(steps) / seconds,
        "generation_seconds": statistics.fmean(each["generation/seconds"] for each in generated) / scale,
        "expected_generation_seconds": statistics.fmean(each["planning/expected_seconds"] for each in generated)
        / scale,
        "learner_busy_seconds": held("learning", "busy") / len(steps),
        "charged_gpu_seconds": charged / len(steps),
        "owned_gpu_seconds": gpus * seconds / len(steps),
        "actors_idle": 1 - held("generation", "busy") / (actors * seconds),
        "learner_idle": 1 - held("learning", "busy") / seconds,
        "actors_busy_seconds": held("generation", "busy") / len(steps),
        "moved_samples": sum(each["generation/moved_samples"] for each in generated) / len(steps),
        "staleness_mean": statistics.fmean(stale),
        "staleness_max": max(stale),
    }


def main() -> None:
    """Run what is not in the file yet, and print."""
    parser = argparse.ArgumentParser(description="Synchronous against asynchronous training, rehearsed.")
    parser.add_argument("--gpus", type=int, default=8, help="of the job")
    parser.add_argument("--learner-gpus", type=int, default=2, help="those that learn, where they are split")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step for each GPU")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds here for each emulated second")
    parser.add_argument("--keep-alive", default="10m", help="how long idle instances are kept")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    arguments = parser.parse_args()
    if arguments.steps <= 2 * ENDS:
        parser.error(f"--steps: {arguments.steps} leaves no step to measure; write at least {2 * ENDS + 1}")
    if not 0 < arguments.learner_gpus < arguments.gpus:
        parser.error(f"--learner-gpus: {arguments.learner_gpus} is not between 1 and {arguments.gpus - 1}")
    given = {name: value for name, value in vars(arguments).items() if name not in ("json", "arms")}
    kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    runs = kept["runs"] if kept.get("settings") == given else {}
    for arm in arguments.arms:
        if arm not in runs:
            with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
                prompts = arguments.prompts * arguments.gpus
                trace = generate(GSM8K_LENGTHS, epochs=arguments.steps, prompts=prompts, samples=8, seed=0)
                write_trace(Path(name) / "trace.parquet", trace)
                runs[arm] = rehearse(arm, Path(name), arguments) | {"machine": describe_machine(["rlhfless"])}
            write_record({"settings": given, "runs": runs}, arguments.json)
        shown = {name: value for name, value in runs[arm].items() if name != "machine"}
        print(", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()), flush=True)


if __name__ == "__main__":
    main()
