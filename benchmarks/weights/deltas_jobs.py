"""Bytes of the weights that change in the steps of whole jobs.

    python benchmarks/weights/deltas_jobs.py [--quickstart-steps 12] [--model-steps 4] [--json FILE]

Jobs run with `learning.weightDeltas: auto` against an S3 server of this machine, and their metrics have `weights/bytes`
and `weights/delta_bytes` of each step. Four jobs train a model of 31 million parameters with fresh random weights on
the quickstart's prompts, in bfloat16 and float32, at 1e-6 and 2e-4. Such a model solves no task, so the reward is the
share of digits in a response. As in the quickstart a step has eight optimizer updates; the learning rate is constant.
The last job is the quickstart, with fewer steps and without evaluations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.places import QUICKSTART
from benchmarks.shared.random_models import random_qwen3
from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.s3_server import start_s3_server

RATES, DTYPES = (1e-6, 2e-4), ("bfloat16", "float32")
REWARD = """
def reward(completions, completion_ids, ground_truth, **columns):
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]
"""


def run(folder: Path, document: dict[str, Any], uri: str) -> list[dict[str, Any]]:
    """Bytes of each step's version and of its delta, of a whole job."""
    from rlhfless_functions import artifacts
    from rlhfless_operator.job.reading.validation import load_job
    from rlhfless_operator.local.local_run import run_locally

    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    job = load_job(file).resolve_paths(file.parent)
    asyncio.run(run_locally(job, uri, threads=1))
    records = [json.loads(line) for line in artifacts.read_bytes(artifacts.join(uri, "metrics.jsonl")).splitlines()]
    return [
        {
            "step": record["step"],
            "bytes": int(record["metrics"]["weights/bytes"]),
            "delta_bytes": int(record["metrics"].get("weights/delta_bytes", 0)),
            "share": round(record["metrics"].get("weights/delta_bytes", 0) / record["metrics"]["weights/bytes"], 4),
        }
        for record in records
        if "weights/bytes" in record["metrics"]
    ]


def quickstart(folder: Path, steps: int) -> dict[str, Any]:
    """The quickstart's job, shorter, with deltas and without evaluations."""
    shutil.copytree(QUICKSTART, folder, dirs_exist_ok=True)
    document: dict[str, Any] = yaml.safe_load((folder / "grpo.yaml").read_text())
    document["spec"] |= {"steps": steps, "learning": {"weightDeltas": "auto", "keepAlive": "10m"}}
    del document["spec"]["evaluation"]
    return document


def larger(folder: Path, steps: int, dtype: str, rate: float) -> dict[str, Any]:
    """A job that trains the model of 126 MB."""
    document = quickstart(folder, steps)
    (folder / "reward.py").write_text(REWARD)
    random_qwen3().save_pretrained(folder / "model")
    spec = document["spec"]
    spec["model"]["dtype"] = dtype
    spec["batch"] |= {"promptsPerStep": 4, "minibatchSamples": 4}
    spec["sampling"]["maxResponseTokens"] = 64
    spec["optimizer"] |= {"learningRate": rate, "schedule": "constant", "warmupSteps": 0}
    del spec["optimizer"]["finalRatio"]
    spec["generation"]["instances"] = {"min": 1, "max": 1}
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart-steps", type=int, default=12)
    parser.add_argument("--model-steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    bucket, _ = start_s3_server()
    results: dict[str, Any] = {
        **described_run(("torch", "transformers", "pyarrow", "moto", "s3fs")),
        "model_of_126_mb": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["RLHFLESS_CACHE"] = f"{scratch}/cache"

        for dtype in DTYPES:
            for rate in RATES:
                folder = Path(scratch, f"{dtype}-{rate}")
                document = larger(folder, given.model_steps, dtype, rate)
                steps = run(folder, document, f"{bucket}/{dtype}-{rate}")
                print(dtype, rate, json.dumps(steps), flush=True)
                results["model_of_126_mb"].append({"dtype": dtype, "learning_rate": rate, "steps": steps})
                write_record(results, given.json)
        folder = Path(scratch, "quickstart")
        document = quickstart(folder, given.quickstart_steps)
        results["quickstart"] = run(folder, document, f"{bucket}/quickstart")
        print("quickstart", json.dumps(results["quickstart"]), flush=True)
        write_record(results, given.json)


if __name__ == "__main__":
    main()
