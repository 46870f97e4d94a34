"""A rehearsed job, and what each of its instances did when.

    python benchmarks/simulator/rehearsal.py [--json FILE]

The driver, its plans and its moves are real; the GPUs are emulated. The job has the lengths and the model of the
scenario paper-3b-gsm8k-grpo. Seconds are measured ones, divided by the time scale.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import job_of_scenario, write_trace_of
from rlhfless_operator.simulator.scenarios import find_scenario

_SCENARIO = "paper-3b-gsm8k-grpo"
_STEPS = 4
_ACTORS = 8
_LEARNER_GPUS = 4
_TIME_SCALE = 0.25


def job(trace: Path, runs: Path) -> dict[str, Any]:
    """Return the job's document."""
    scenario = find_scenario(_SCENARIO)
    document = job_of_scenario(
        scenario,
        "rehearsal",
        trace,
        steps=_STEPS,
        learner_gpus=_LEARNER_GPUS,
        startup_seconds=scenario.startup_seconds,
        time_scale=_TIME_SCALE,
    )
    document["spec"]["artifacts"] = {"uri": str(runs)}
    document["spec"]["generation"]["instances"] = {"max": _ACTORS}
    return document


def rehearse(folder: Path) -> dict[str, Any]:
    """Run the job in a folder; its steps, and the spans of its instances."""
    trace = folder / "trace.parquet"
    write_trace_of(find_scenario(_SCENARIO), _STEPS, trace, seed=0)
    file, runs = folder / "job.json", folder / "runs"
    file.write_text(json.dumps(job(trace, runs)))
    rlhfless = "from rlhfless_operator.cli import main; main()"
    subprocess.run([sys.executable, "-c", rlhfless, "run", str(file)], check=True, cwd=folder, stdout=sys.stderr)
    metrics, ledger = (_lines(runs / "rehearsal" / name) for name in ("metrics.jsonl", "ledger.jsonl"))
    spans = [
        {**span, "start": round(span["start"] / _TIME_SCALE, 2), "end": round(span["end"] / _TIME_SCALE, 2)}
        for span in ledger
    ]
    return {"steps": [_step(record) for record in metrics], "spans": spans}


def _step(record: dict[str, Any]) -> dict[str, Any]:
    stages = {name: round(value / _TIME_SCALE, 2) for name, value in record["stages"].items()}
    return {
        "step": record["step"],
        "seconds": round(record["seconds"] / _TIME_SCALE, 2),
        "stages": stages,
        "actors": record["plan"]["actors"],
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    """Rehearse, print a line for each step, and write the file."""
    parser = argparse.ArgumentParser(description="A rehearsed job.")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        result = rehearse(Path(name))
    for step in result["steps"]:
        print(f"step {step['step']}: {step['seconds']:.1f} s, {step['actors']} actors")
    setting = {"scenario": _SCENARIO, "steps": _STEPS, "actors": _ACTORS, "learner_gpus": _LEARNER_GPUS}
    record = described_run(["rlhfless"]) | {"setting": setting | {"time_scale": _TIME_SCALE}}
    write_record({**record, **result}, given.json)


if __name__ == "__main__":
    main()
