"""Rehearse a job whose environments take their time, on emulated GPUs, with letting actors go and without.

    python benchmarks/environments/rehearsed.py [--seconds 2 20 60] [--prompts 2] [--samples 4] [--time-scale 0.2]
        [--artifacts DIR] [--json FILE]

Each run is a job of Qwen2.5-7B on H100s, of real processes on this machine; only the GPUs and the environments are
emulated. An environment takes about `--seconds` for an answer, some twice as long as others. The figures are of the
last of three steps, in seconds of the real thing: the first step must see how long the environments take.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.shared.local_jobs import run_job
from benchmarks.shared.records import described_run, write_record
from rlhfless_functions.data.traces import TraceRows, write_trace_rows

STEPS = 3
TURN_TOKENS, GIVEN_TOKENS = 150, 80
HELD = ("starting", "busy", "idle", "switching", "draining")


def trace_rows(seconds: float, prompts: int, samples: int) -> TraceRows:
    """Return responses of two to five turns, whose environments take so many seconds for an answer."""
    random = np.random.default_rng(0)
    step, prompt, sample = np.indices((STEPS, prompts, samples)).reshape(3, -1)
    turns = random.integers(2, 6, len(step))
    tokens = np.rint(TURN_TOKENS * turns * random.lognormal(0, 0.4, len(step))).astype(np.int64)
    away = 1000 * seconds * (turns + 1) * random.uniform(0.7, 1.3, len(step))
    return TraceRows(
        *(prompt, step, sample, np.full_like(prompt, 300), tokens, step + 1),
        turns=turns,
        given_tokens=GIVEN_TOKENS * turns,
        away_milliseconds=away.astype(np.int64),
    )


def run(folder: Path, seconds: float, let_go: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rehearse one job, and return the figures of its last step."""
    time_scale, startup = options.time_scale, options.startup
    name = f"wait-{seconds:g}-{let_go}".replace(".", "-")
    trace = folder / f"{name}.parquet"
    write_trace_rows(str(trace), trace_rows(seconds, options.prompts, options.samples))
    spec = {
        "model": {"source": "Qwen/Qwen2.5-7B"},
        "data": {"source": str(trace)},
        "rewards": [{"name": "solved", "environment": {}}],
        "sampling": {"maxPromptTokens": 1024, "maxResponseTokens": 8192},
        "batch": {"promptsPerStep": options.prompts, "samplesPerPrompt": options.samples},
        "steps": STEPS,
        "generation": {"instances": {"max": 4}},
        "environment": {"openenv": {"url": "http://not-asked"}, "letGo": let_go, "replayable": True},
        "artifacts": {"uri": str(folder / "runs")},
        "rehearsal": {"trace": str(trace), "gpu": "H100", "startup": f"{startup:g}s", "timeScale": time_scale},
    }
    file = folder / f"{name}.yaml"
    document = {"apiVersion": "rlhfless.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": name}, "spec": spec}
    file.write_text(yaml.safe_dump(document))
    last = run_job(file, folder / "runs" / name)[-1]
    held = {stage: sum(account[state] for state in HELD) / time_scale for stage, account in last["ledger"].items()}
    return {
        "seconds": seconds,
        "let_go": let_go,
        "actors": last["plan"]["actors"],
        "step_seconds": last["seconds"] / time_scale,
        "expected_generation_seconds": last["plan"]["expected_seconds"] / time_scale,
        "generation_seconds": last["stages"]["generation"] / time_scale,
        "gpu_seconds": held["generation"],
        "all_gpu_seconds": sum(held.values()),
        "share_let_go": last["metrics"].get("generation/let_go", 0.0),
    }


def main() -> None:
    """Run all jobs, and print a row as each one ends."""
    parser = argparse.ArgumentParser(description="Rehearse jobs with slow environments, and let actors go or not.")
    parser.add_argument("--seconds", type=float, nargs="+", default=[2, 20, 60], help="seconds of an answer")
    parser.add_argument("--prompts", type=int, default=2, help="prompts a step")
    parser.add_argument("--samples", type=int, default=4, help="samples a prompt")
    parser.add_argument("--startup", type=float, default=2.0, help="seconds in which an instance starts")
    parser.add_argument("--time-scale", type=float, default=0.2, help="seconds here for each second of the real thing")
    parser.add_argument("--artifacts", type=Path, help="folder for the jobs; by default one that is removed")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    rows = []
    print("| An answer takes | `letGo` | Actors | Generation | Held: actors | all | Let go |")
    print("|---|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as made:
        folder = options.artifacts or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for seconds in options.seconds:
            for let_go in ("never", "auto"):
                row = run(folder, seconds, let_go, options)
                rows.append(row)
                print(
                    f"| {seconds:g} s | {let_go} | {row['actors']} | {row['generation_seconds']:.1f} s"
                    f" | {row['gpu_seconds']:.1f} s | {row['all_gpu_seconds']:.1f} s | {row['share_let_go']:.0%} |",
                    flush=True,
                )
    settings = {name: getattr(options, name) for name in ("prompts", "samples", "startup", "time_scale")}
    write_record({**described_run(("numpy",)), **settings, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
