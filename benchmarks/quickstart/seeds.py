"""Train the quickstart with several seeds and tabulate held-out accuracy before and after.

    python benchmarks/quickstart/seeds.py [--jobs grpo ppo] [--seeds 0 1 2] [--threads 2] [--artifacts DIR]
        [--engine vllm] [--keep-alive 10m] [--steps 48] [--set spec.model.dtype=bfloat16] [--kills 10] [--json FILE]

Prints a Markdown table, a row as each run ends. The gap is the greatest of all steps of mean exp|trainer − engine|, of
log-probabilities at equal weights (at those that sampled, with `async`); rounds are the mean of a step's with dynamic
sampling, and staleness, in the JSON, is that of its groups. The JSON also has the accuracy after each step with an
evaluation, of which there are more with `--set spec.evaluation.everySteps=4`. The weights are a digest of the last
ones. With `--kills` so many of the driver and the instances are killed at random in each run, as the tests do it, and
the digest is that of an undisturbed run. With `--engine vllm` it runs in the environment that `make test-vllm` makes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.places import QUICKSTART, REPOSITORY
from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.job.reading.validation import load_job

PACKAGES = ("torch", "transformers", "vllm", "numpy")


def train(algorithm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one job to its end and return its summary, with the greatest gap between engine and trainer."""
    resolved = load_job(QUICKSTART / f"{algorithm}.yaml", settings=options.settings).resolve_paths(QUICKSTART)
    job = resolved.model_dump(mode="json", by_alias=True, exclude_none=True)
    name = f"{algorithm}-{options.engine}-seed-{seed}" + (f"-killed-{options.kills}" if options.kills else "")
    job["metadata"]["name"], job["spec"]["seed"] = name, seed
    job["spec"]["generation"]["engine"] = options.engine
    if options.steps is not None:
        job["spec"]["steps"] = options.steps
    if options.keep_alive is not None:
        job["spec"]["generation"]["keepAlive"] = options.keep_alive
    if options.kills:
        job["spec"]["limits"] = {"retries": options.kills}
    folder = options.artifacts / name
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "rlhfless_operator", "run", str(file)]
        command += ["--artifacts", str(options.artifacts), "--threads", str(options.threads)]
        killed = run(command, Path(place) / "log.txt", options, seed)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [record["metrics"] for record in records if record["step"]]
    return summary | {
        "model": str(Path(summary["model"]).relative_to(REPOSITORY)),
        # A step has none if all of its responses were sampled by weights of several versions.
        "gap": max(each["mismatch/mean_exp_abs"] for each in metrics if "mismatch/mean_exp_abs" in each),
        "rounds": statistics.fmean(each["dynamic_sampling/rounds"] for each in metrics),
        "staleness": statistics.fmean(each.get("generation/staleness", 0.0) for each in metrics),
        "accuracy": {record["step"]: record["evaluation"]["reward"] for record in records if record["evaluation"]},
        "weights_sha256": hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "killed": killed,
    }


def run(command: list[str], log: Path, options: argparse.Namespace, seed: int) -> dict[str, int]:
    """Run a job to its end; what was killed on the way, by kind."""
    if not options.kills:
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return {}
    from tests.training.killing import run_killing

    chance = random.Random(seed)
    killed = run_killing(command, log, chance, kills=options.kills, pause=options.kill_seconds, patience=24 * 3600)
    if killed.victims.total() < options.kills:
        raise SystemExit(f"the run ended after {killed.victims.total()} kills; lower --kill-seconds")
    return dict(killed.victims)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--artifacts", type=Path, default=Path("runs"))
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--keep-alive", help="instead of the job's own")
    parser.add_argument("--steps", type=int, help="instead of the job's own")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="instead of the job's own, any field"
    )
    parser.add_argument("--json", type=Path, help="also write the summaries here")
    parser.add_argument("--kills", type=int, default=0, help="how many processes are killed in each run")
    parser.add_argument("--kill-seconds", type=float, default=20.0, help="most seconds from one kill to the next")
    arguments = parser.parse_args()
    titles = "Job | Seed | Accuracy before | after | Reward first step | last step | Seconds | Instance-seconds | Gap"
    print(f"| {titles} | Rounds | Kills | Weights |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    runs = []
    for algorithm in arguments.jobs:
        for seed in arguments.seeds:
            result = train(algorithm, seed, arguments)
            runs.append({"seed": seed, "engine": arguments.engine, **result})
            keys = ("held_out_reward_before", "held_out_reward_after", "reward_first", "reward_last")
            numbers = [result[key] for key in keys]
            cells = [algorithm, str(seed), *(f"{number:.3f}" for number in numbers)]
            cells += [f"{result['seconds']:.0f}", f"{result['gpu_seconds']:.0f}", f"{result['gap']:.6f}"]
            cells += [f"{result['rounds']:.2f}", str(sum(result["killed"].values())), result["weights_sha256"][:12]]
            print(f"| {' | '.join(cells)} |", flush=True)
    write_record({**described_run(PACKAGES), "threads": arguments.threads, "runs": runs}, arguments.json)


if __name__ == "__main__":
    main()
