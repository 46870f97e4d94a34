"""A quickstart step by rlhfless against one by TRL's GRPOTrainer: same model, data, sizes and threads, one run.

The two take turns on the machine, `--rounds` times: a drift of the machine's speed affects both. The benchmark compares
the median wall time of the steps after the first, which includes start-up on both sides.

    python benchmarks/peers/step_time.py [--steps 6] [--rounds 2] [--threads 2] [--output results.json]

With `--tools`, it is the example whose model acts with two tools, in several turns.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.peak_memory import PeakMemory
from benchmarks.shared.places import BENCHMARKS, QUICKSTART, TOOLS
from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.job.reading.validation import load_job


def run_rlhfless(example: Path, steps: int, threads: int, folder: Path) -> dict[str, Any]:
    """Run an example's GRPO job for a few steps and read its records."""
    resolved = load_job(example / "grpo.yaml").resolve_paths(example)
    job = resolved.model_dump(mode="json", by_alias=True, exclude_none=True)
    job["spec"]["steps"] = steps
    del job["spec"]["evaluation"]
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(folder / "job.yaml")]
    command += ["--artifacts", str(folder), "--threads", str(threads)]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = PeakMemory(driver.pid)
    if driver.wait() != 0:
        raise SystemExit(f"rlhfless ended with status {driver.returncode}")
    lines = (folder / job["metadata"]["name"] / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][1:]
    stages = records[0]["stages"]
    return {
        "step_seconds": [record["seconds"] for record in records],
        "rewards": [record["metrics"]["reward"] for record in records],
        "response_tokens": [record["metrics"]["lengths"] for record in records],
        "stage_seconds": {stage: statistics.median(record["stages"][stage] for record in records) for stage in stages},
        "driver_peak_bytes": peak.driver,
        "all_processes_peak_bytes": peak.everything,
    }


def run_trl(example: Path, steps: int, threads: int) -> dict[str, Any]:
    """Run the peer benchmark and read what it prints."""
    command = [sys.executable, str(BENCHMARKS / "peers" / "trl_grpo.py")]
    command += ["--steps", str(steps), "--threads", str(threads), *(["--tools"] if example == TOOLS else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


def main() -> None:
    """Measure, print and keep the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps of each run, the first of which does not count")
    parser.add_argument("--rounds", type=int, default=2, help="how often the two take turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="also write the result here")
    parser.add_argument("--tools", action="store_true", help="the example with tools, and not the quickstart")
    arguments = parser.parse_args()
    example = TOOLS if arguments.tools else QUICKSTART
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            ours.append(run_rlhfless(example, arguments.steps, arguments.threads, Path(folder, str(number))))
            theirs.append(run_trl(example, arguments.steps, arguments.threads))
    our_step = statistics.median(seconds for run in ours for seconds in run["step_seconds"])
    trl_step = statistics.median(run["step_seconds"] for run in theirs)
    result = {
        "rlhfless_step_seconds": our_step,
        "trl_step_seconds": trl_step,
        "ratio": our_step / trl_step,
        "rlhfless": ours,
        "trl": theirs,
        "threads": arguments.threads,
        **described_run(("torch", "transformers", "trl")),
    }
    print(json.dumps(result, indent=2))
    write_record(result, arguments.output)


if __name__ == "__main__":
    main()
