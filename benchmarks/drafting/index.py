"""Measure drafting: the index by itself, and the quickstart's generation with drafting on and off.

    python benchmarks/drafting/index.py index --responses 100000 --tokens 2000 [--json FILE]
    python benchmarks/drafting/index.py job --steps 24

`index` says what building the index takes, how much memory, and how long a look-up is, for one sequence and for 128 at
a time, in CPU seconds.
Responses are random walks over a vocabulary of 50,000, eight to a prompt, each a variation of its prompt's.
`job` trains the quickstart twice at the same time, with `drafting: auto` and `never`, one thread an instance, compares
the weights' digests, and prints generation's seconds and tokens a pass by pass over the data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.shared.machine import describe_machine
from benchmarks.shared.places import QUICKSTART
from rlhfless_functions.data.draft_history import KnownResponse
from rlhfless_functions.generation.drafting.index import SEPARATOR, DraftIndex

STEPS_A_PASS = 8
"""Steps in which the quickstart's job sees all of its prompts once."""


def measure_index(responses: int, tokens: int) -> dict[str, Any]:
    """Build an index of so many responses and look sequences up in it."""
    numbers = np.random.default_rng(0)
    rows = 128
    index = DraftIndex(responses * (tokens + 17), rows, tokens + 32)
    seconds = 0.0
    newest: list[list[int]] = []
    for first in range(0, responses, 8):
        base = numbers.integers(0, 50_000, tokens)
        group = []
        for _ in range(min(8, responses - first)):
            changed = numbers.random(tokens) < 0.05
            group.append(np.where(changed, numbers.integers(0, 50_000, tokens), base).tolist())
        known = [KnownResponse(first // 8, [first % 1000 + number for number in range(16)], each) for each in group]
        began = time.process_time()
        index.add(known)
        seconds += time.process_time() - began
        newest = [*newest, *group][-rows:]
    prompts = np.array([(responses - len(newest) + number) // 8 for number in range(len(newest))])
    ends = []
    for row, response in enumerate(newest):
        start = int(index.starts[row])
        known_tokens = response[: tokens // 2]
        index.tokens[start : start + len(known_tokens) + 1] = [*known_tokens, SEPARATOR]
        ends.append(start + len(known_tokens))
    places = np.array(ends)

    def look_up_microseconds(sequences: int) -> float:
        times = []
        for _ in range(200):
            began = time.process_time()
            index.look_up(places[:sequences], prompts[:sequences])
            times.append(time.process_time() - began)
        return float(np.median(times)) * 1e6 / sequences

    found = index.look_up(places, prompts)[1]
    return {
        "responses": responses,
        "tokens": tokens,
        "build_seconds": seconds,
        "build_nanoseconds_a_token": seconds / (responses * tokens) * 1e9,
        "bytes": index.bytes,
        "bytes_a_token": index.bytes / (responses * tokens),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "look_up_microseconds_alone": look_up_microseconds(1),
        "look_up_microseconds_in_a_batch_of_128": look_up_microseconds(len(places)),
        "found": float((found > 0).mean()),
    }


def measure_job(steps: int) -> dict[str, Any]:
    """Train the quickstart with drafting and without, side by side."""
    with tempfile.TemporaryDirectory() as root:
        runs = {}
        for drafting in ("auto", "never"):
            folder = Path(root) / drafting
            shutil.copytree(QUICKSTART, folder)
            job = yaml.safe_load((folder / "grpo.yaml").read_text())
            job["spec"]["steps"] = steps
            job["spec"].pop("evaluation", None)
            job["spec"]["generation"] |= {"drafting": drafting, "engine": "transformers"}
            (folder / "grpo.yaml").write_text(yaml.safe_dump(job))
            command = [sys.executable, "-m", "rlhfless_operator", "run", "grpo.yaml", "--threads", "1"]
            command += ["--artifacts", "runs"]
            runs[drafting] = subprocess.Popen(command, cwd=folder, stdout=sys.stderr)
        for drafting, process in runs.items():
            if process.wait() != 0:
                raise SystemExit(f"the run with drafting: {drafting} failed")
        return {drafting: _outcome(Path(root) / drafting) for drafting in runs}


def _outcome(folder: Path) -> dict[str, Any]:
    (run,) = (folder / "runs").iterdir()
    records = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256()
    for file in sorted((run / "model").glob("*.safetensors")):
        digest.update(file.read_bytes())
    passes = [
        {
            "generation_seconds": sum(metrics["generation/seconds"] for metrics in each),
            "tokens_per_pass": sum(metrics["generation/tokens_per_pass"] for metrics in each) / len(each),
            "passes": sum(metrics["generation/passes"] for metrics in each),
            "drafts_tried": sum(metrics["generation/drafts/tried"] for metrics in each),
            "drafts_accepted": sum(metrics["generation/drafts/accepted"] for metrics in each),
        }
        for each in (records[first : first + STEPS_A_PASS] for first in range(0, len(records), STEPS_A_PASS))
    ]
    return {"weights": digest.hexdigest(), "by_pass_over_the_data": passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    index = commands.add_parser("index")
    index.add_argument("--responses", type=int, default=100_000)
    index.add_argument("--tokens", type=int, default=2_000)
    index.add_argument("--json", type=Path)
    job = commands.add_parser("job")
    job.add_argument("--steps", type=int, default=24)
    job.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measured = (
        measure_index(arguments.responses, arguments.tokens)
        if arguments.command == "index"
        else measure_job(arguments.steps)
    )
    result = {"command": " ".join(["python", *sys.argv]), **describe_machine(["numpy", "torch"]), **measured}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
