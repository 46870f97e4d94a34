"""Held-out accuracy of the quickstart after every few steps: synchronous, and asynchronous in three ways.

    python benchmarks/asynchronous/accuracy_over_time.py --json FILE [--seeds 0 1 2]
        [--arms static async-1 async-2 async-2-keep] [--every 4] [--threads 1]

Arms that do not run again stay in FILE as they were measured. `python docs/pictures.py asynchronous` draws the mean
over the seeds against time. A step takes as long there as in `async_against_sync_groups.json`, on emulated GPUs: on two
cores generation and learning share the cores, and an asynchronous job has no time to win.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.quickstart.seeds import PACKAGES, train
from benchmarks.shared.records import described_run, write_record

ARMS = {
    "static": [],
    "async-1": ["spec.async.maxStaleness=1"],
    "async-2": ["spec.async.maxStaleness=2"],
    "async-2-keep": [
        "spec.async.maxStaleness=2",
        "spec.async.newWeights=switch",
        "spec.async.kvCache=keep",
        "spec.async.tooStale=downweight",
    ],
}
"""The changes to the quickstart's document, by the names that `against_synchronous.py` has for the same jobs."""


def main() -> None:
    """Train, and write what came out after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--every", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    kept = json.loads(given.json.read_text()) if given.json.exists() else {"jobs": {}, "runs": []}
    jobs: dict[str, dict[str, float]] = kept["jobs"]
    runs: list[dict[str, Any]] = [run for run in kept["runs"] if run["arm"] not in given.arms]
    for arm in given.arms:
        found: list[dict[str, float]] = []
        for seed in given.seeds:
            with tempfile.TemporaryDirectory() as artifacts:
                options = argparse.Namespace(
                    settings=[*ARMS[arm], f"spec.evaluation.everySteps={given.every}"],
                    artifacts=Path(artifacts),
                    engine="auto",
                    steps=None,
                    keep_alive=None,
                    kills=0,
                    threads=given.threads,
                )
                run = train("grpo", seed, options)
            found.append({str(step): accuracy for step, accuracy in run["accuracy"].items()})
            runs.append({"arm": arm, "seed": seed, "staleness": run["staleness"], "accuracy": found[-1]})
            print(
                f"{arm}, seed {seed}: {run['held_out_reward_after']:.3f}, staleness {run['staleness']:.2f}", flush=True
            )
        jobs[arm] = {step: statistics.fmean(accuracy[step] for accuracy in found) for step in found[0]}
        measured = {**described_run(PACKAGES), "every": given.every, "threads": given.threads}
        write_record({**measured, "jobs": jobs, "runs": runs}, given.json)


if __name__ == "__main__":
    main()
