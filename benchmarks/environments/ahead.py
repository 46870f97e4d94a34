"""Train the example with slow environments, synchronously and with rollouts that go ahead of the learner.

    python benchmarks/environments/ahead.py [--seconds 2] [--prompts 8] [--samples 4] [--steps 8] [--json FILE]

Each run is a job of its own, of real processes on this machine with two actors. A call of a tool takes `--seconds`, and
no actor is let go. The figures are means of the steps after the first two, in which rollouts that go ahead begin.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.environments.slow_example import batch, slow_job
from benchmarks.shared.local_jobs import run_job
from benchmarks.shared.records import described_run, write_record

SKIPPED = 2
"""Steps at the beginning that do not count."""
HELD = ("starting", "busy", "idle", "switching", "draining")
JOBS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "maxStaleness: 1": {"async": {"maxStaleness": 1}},
    "maxStaleness: 1, switch": {"async": {"maxStaleness": 1, "newWeights": "switch"}},
    "maxStaleness: 2, switch": {"async": {"maxStaleness": 2, "newWeights": "switch"}},
}


def run(folder: Path, what: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one job to its end, and return means of its steps."""
    name = f"ahead-{list(JOBS).index(what)}"
    spec = {
        "batch": batch(options.prompts, options.samples),
        "steps": options.steps,
        "generation": {"instances": {"min": 2, "max": 2}},
        **JOBS[what],
    }
    file = slow_job(folder, name, options.seconds, {"letGo": "never"}, spec)
    steps = run_job(file, folder / "runs" / name)[SKIPPED:]
    held = [sum(step["ledger"]["generation"][state] for state in HELD) for step in steps]
    return {
        "what": what,
        "seconds": fmean(step["seconds"] for step in steps),
        "actor_seconds": fmean(held),
        "turns": fmean(step["metrics"]["environment/turns"] for step in steps),
        "staleness": fmean(step["metrics"].get("generation/staleness", 0.0) for step in steps),
    }


def main() -> None:
    """Run all jobs, and print a row as each one ends."""
    parser = argparse.ArgumentParser(description="Train with slow environments, ahead of the learner or not.")
    parser.add_argument("--seconds", type=float, default=2, help="seconds of a call")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step")
    parser.add_argument("--samples", type=int, default=4, help="samples a prompt")
    parser.add_argument("--steps", type=int, default=8, help="steps of a job")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    rows = []
    print("| Job | A step | Actors held | Turns | Staleness |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for what in JOBS:
            row = run(Path(folder), what, options)
            print(
                f"| {what} | {row['seconds']:.1f} s | {row['actor_seconds']:.1f} s"
                f" | {row['turns']:.1f} | {row['staleness']:.2f} |",
                flush=True,
            )
            rows.append(row)
    write_record(
        {**described_run(("torch", "transformers")), "seconds_of_a_call": options.seconds, "rows": rows}, options.json
    )


if __name__ == "__main__":
    main()
