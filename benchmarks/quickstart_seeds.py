"""Train the quickstart with several seeds and tabulate held-out accuracy before and after.

    python benchmarks/quickstart_seeds.py [--jobs grpo ppo] [--seeds 0 1 2] [--threads 2] [--artifacts DIR]
        [--engine vllm] [--keep-alive 10m] [--steps 48] [--json FILE]

Prints a Markdown table, a row as each run ends. The gap is the greatest of all steps of mean exp|trainer − engine|, of
log-probabilities at equal weights. With `--engine vllm` it runs in the environment that `make test-vllm` makes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from rlhfless_operator.job.validation import load_job

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart"


def train(
    algorithm: str, seed: int, threads: int, artifacts: Path, engine: str, keep_alive: str | None, steps: int | None
) -> dict[str, Any]:
    """Run one job to its end and return its summary, with the greatest gap between engine and trainer."""
    resolved = load_job(QUICKSTART / f"{algorithm}.yaml").resolve_paths(QUICKSTART)
    job = resolved.model_dump(mode="json", by_alias=True, exclude_none=True)
    name = f"{algorithm}-{engine}-seed-{seed}"
    job["metadata"]["name"], job["spec"]["seed"] = name, seed
    job["spec"]["generation"]["engine"] = engine
    if steps is not None:
        job["spec"]["steps"] = steps
    if keep_alive is not None:
        job["spec"]["generation"]["keepAlive"] = keep_alive
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(job, file)
        file.flush()
        command = [sys.executable, "-m", "rlhfless_operator", "run", file.name]
        command += ["--artifacts", str(artifacts), "--threads", str(threads)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads((artifacts / name / "summary.json").read_text())
    records = [json.loads(line) for line in (artifacts / name / "metrics.jsonl").read_text().splitlines()]
    gaps = [record["metrics"]["mismatch/mean_exp_abs"] for record in records if record["step"]]
    return summary | {"model": str(Path(summary["model"]).relative_to(QUICKSTART.parent.parent)), "gap": max(gaps)}


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
    parser.add_argument("--json", type=Path, help="also write the summaries here")
    arguments = parser.parse_args()
    print("| Job | Seed | Accuracy before | after | Reward first step | last step | Seconds | Instance-seconds | Gap |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    runs = []
    for algorithm in arguments.jobs:
        for seed in arguments.seeds:
            run = train(
                algorithm,
                seed,
                arguments.threads,
                arguments.artifacts,
                arguments.engine,
                arguments.keep_alive,
                arguments.steps,
            )
            runs.append({"seed": seed, "engine": arguments.engine, **run})
            numbers = [run[key] for key in ("accuracy_before", "accuracy_after", "reward_first", "reward_last")]
            cells = [algorithm, str(seed), *(f"{number:.3f}" for number in numbers)]
            cells += [f"{run['seconds']:.0f}", f"{run['gpu_seconds']:.0f}", f"{run['gap']:.6f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
