"""Train the quickstart with several seeds and tabulate held-out accuracy before and after.

    python benchmarks/quickstart_seeds.py [--jobs grpo ppo] [--seeds 0 1 2] [--threads 2] [--artifacts DIR]

Prints a Markdown table, a row as each run ends.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from rlhfless_operator.validation import load_job

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart"


def train(algorithm: str, seed: int, threads: int, artifacts: Path) -> dict[str, Any]:
    """Run one job to its end and return its summary."""
    resolved = load_job(QUICKSTART / f"{algorithm}.yaml").resolve_paths(QUICKSTART)
    job = resolved.model_dump(mode="json", by_alias=True, exclude_none=True)
    name = f"{algorithm}-seed-{seed}"
    job["metadata"]["name"], job["spec"]["seed"] = name, seed
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(job, file)
        file.flush()
        command = [sys.executable, "-m", "rlhfless_operator", "run", file.name]
        command += ["--artifacts", str(artifacts), "--threads", str(threads)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads((artifacts / name / "summary.json").read_text())
    return summary


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--artifacts", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    print("| Job | Seed | Accuracy before | after | Reward first step | last step | Seconds | Instance-seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for algorithm in arguments.jobs:
        for seed in arguments.seeds:
            run = train(algorithm, seed, arguments.threads, arguments.artifacts)
            numbers = [run[key] for key in ("accuracy_before", "accuracy_after", "reward_first", "reward_last")]
            cells = [algorithm, str(seed), *(f"{number:.3f}" for number in numbers)]
            cells += [f"{run['seconds']:.0f}", f"{run['gpu_seconds']:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
