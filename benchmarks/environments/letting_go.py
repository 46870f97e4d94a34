"""Train the example with environments that take their time, with letting actors go and without.

    python benchmarks/environments/letting_go.py [--seconds 0 0.2 2 20] [--prompts 2] [--samples 2] [--steps 3]
        [--artifacts DIR] [--json FILE]

Each run is a job of its own, of real processes on this machine: an instance stands for one with a GPU. A call of a tool
takes `--seconds`. The figures are those of the last step, as the first one must see how long the environments take:
tokens that were sampled a second of generation, and the seconds for which instances were held, at work or not. The
weights must be the same with and without.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.environments.slow_example import batch, slow_job
from benchmarks.shared.local_jobs import run_job
from benchmarks.shared.records import described_run, write_record

HELD = ("starting", "busy", "idle", "switching", "draining")


def run(folder: Path, seconds: float, let_go: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one job to its end, and return the figures of its last step."""
    name = f"wait-{seconds:g}-{let_go}".replace(".", "-")
    samples = options.prompts * options.samples
    spec = {
        "batch": batch(options.prompts, options.samples),
        "steps": options.steps,
        "generation": {"instances": {"min": 1, "max": 1}},
        # The weights of two runs are compared.
        "learning": {"overlap": "never"},
    }
    file = slow_job(folder, name, seconds, {"letGo": let_go}, spec)
    run_folder = folder / "runs" / name
    last = run_job(file, run_folder)[-1]
    ledger, metrics = last["ledger"], last["metrics"]
    held = {stage: sum(account[state] for state in HELD) for stage, account in ledger.items()}
    return {
        "seconds": seconds,
        "let_go": let_go,
        "turns": metrics["environment/turns"],
        "tokens_per_second": metrics["lengths"] * samples / last["stages"]["generation"],
        "generation_seconds": last["stages"]["generation"],
        "gpu_seconds": held["generation"],
        "all_gpu_seconds": sum(held.values()),
        "share_let_go": metrics.get("generation/let_go", 0.0),
        "weights_sha256": hashlib.sha256((run_folder / "model" / "model.safetensors").read_bytes()).hexdigest(),
    }


def main() -> None:
    """Run all jobs, and print a row as each one ends."""
    parser = argparse.ArgumentParser(description="Train with slow environments, and let actors go or not.")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0, 0.2, 2, 20], help="seconds of a call")
    parser.add_argument("--prompts", type=int, default=2, help="prompts a step")
    parser.add_argument("--samples", type=int, default=2, help="samples a prompt")
    parser.add_argument("--steps", type=int, default=3, help="steps of a job")
    parser.add_argument("--artifacts", type=Path, help="folder for the jobs; by default one that is removed")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    rows = []
    print("| A call takes | `letGo` | Turns | Tokens a second | Generation | Held: actors | all | Let go |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as made:
        folder = options.artifacts or Path(made)
        for seconds in options.seconds:
            pair = [run(folder, seconds, let_go, options) for let_go in ("never", "auto")]
            for row in pair:
                print(
                    f"| {row['seconds']:g} s | {row['let_go']} | {row['turns']:.1f}"
                    f" | {row['tokens_per_second']:.2f} | {row['generation_seconds']:.1f} s"
                    f" | {row['gpu_seconds']:.1f} s | {row['all_gpu_seconds']:.1f} s | {row['share_let_go']:.0%} |",
                    flush=True,
                )
            if pair[0]["weights_sha256"] != pair[1]["weights_sha256"]:
                raise SystemExit(f"the weights differ at {seconds:g} s a call")
            rows += pair
    write_record({**described_run(("torch", "transformers")), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
