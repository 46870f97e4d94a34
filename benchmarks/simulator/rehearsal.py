"""A rehearsed job, and what each of its instances did when.

    python benchmarks/simulator/rehearsal.py [--time-scale 1] [--json FILE]

The driver, its plans and its moves are real; the GPUs are emulated. The job has the lengths and the model of the
scenario paper-3b-gsm8k-grpo. Seconds are measured ones, divided by the time scale. The less that is, the more the time
of this machine weighs. It also prints the share of the GPU-seconds held that is work, from the second step on. Loading
a learner's state and saving it are no work.
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


def job(trace: Path, runs: Path, time_scale: float) -> dict[str, Any]:
    """Return the job's document."""
    scenario = find_scenario(_SCENARIO)
    document = job_of_scenario(
        scenario,
        "rehearsal",
        trace,
        steps=_STEPS,
        learner_gpus=_LEARNER_GPUS,
        startup_seconds=scenario.startup_seconds,
        time_scale=time_scale,
    )
    document["spec"]["artifacts"] = {"uri": str(runs)}
    document["spec"]["generation"]["instances"] = {"max": _ACTORS}
    return document


def rehearse(folder: Path, time_scale: float) -> dict[str, Any]:
    """Run the job in a folder; its steps, and the spans of its instances."""
    trace = folder / "trace.parquet"
    write_trace_of(find_scenario(_SCENARIO), _STEPS, trace, seed=0)
    file, runs = folder / "job.json", folder / "runs"
    file.write_text(json.dumps(job(trace, runs, time_scale)))
    rlhfless = "from rlhfless_operator.cli import main; main()"
    subprocess.run([sys.executable, "-c", rlhfless, "run", str(file)], check=True, cwd=folder, stdout=sys.stderr)
    metrics, ledger = (_lines(runs / "rehearsal" / name) for name in ("metrics.jsonl", "ledger.jsonl"))
    spans = [
        {**span, "start": round(span["start"] / time_scale, 2), "end": round(span["end"] / time_scale, 2)}
        for span in ledger
    ]
    return {"steps": [_step(record, time_scale) for record in metrics], "spans": spans}


def _step(record: dict[str, Any], time_scale: float) -> dict[str, Any]:
    stages = {name: round(value / time_scale, 2) for name, value in record["stages"].items()}
    taking_up = sum(record["metrics"].get(f"seconds/{part}", 0.0) for part in ("load", "replay"))
    return {
        "step": record["step"],
        "seconds": round(record["seconds"] / time_scale, 2),
        "stages": stages,
        "actors": record["plan"]["actors"],
        "taking_up": round(taking_up / time_scale, 2),
    }


def gpu_seconds(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the GPU-seconds of each stage from the second step on, by state; `work` is what is left of `busy` without
    the seconds in which learners load their state or repeat steps."""
    steps, found = result["steps"], dict[str, dict[str, float]]()
    ends = sorted(span["end"] for span in result["spans"] if span["stage"] == "learning" and span["state"] == "busy")
    since = next(end for end in ends if end >= steps[0]["seconds"] - 1)
    for span in result["spans"]:
        seconds = max(0.0, span["end"] - max(since, span["start"]))
        if span["state"] != "asleep" and seconds:
            stage, gpus = span["stage"], _LEARNER_GPUS if span["stage"] == "learning" else 1
            by_state = found.setdefault(stage, {})
            by_state[span["state"]] = by_state.get(span["state"], 0.0) + gpus * seconds
    for stage, by_state in found.items():
        taking_up = sum(step["taking_up"] for step in steps[1:]) if stage == "learning" else 0.0
        by_state["work"] = by_state.get("busy", 0.0) - _LEARNER_GPUS * taking_up
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    """Rehearse, print a line for each step, and write the file."""
    parser = argparse.ArgumentParser(description="A rehearsed job.")
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds here for each emulated one")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        result = rehearse(Path(name), given.time_scale)
    for step in result["steps"]:
        print(f"step {step['step']}: {step['seconds']:.1f} s, {step['actors']} actors")
    held, work = 0.0, 0.0
    for stage, by_state in gpu_seconds(result).items():
        of_stage = sum(seconds for state, seconds in by_state.items() if state != "work")
        held, work = held + of_stage, work + by_state["work"]
        states = ", ".join(f"{state} {seconds:.0f}" for state, seconds in by_state.items())
        print(
            f"{stage}: {of_stage:.0f} GPU-seconds from the second step on ({states}): {by_state['work'] / of_stage:.0%}"
        )
    print(f"all stages: {held:.0f} GPU-seconds, of which {work / held:.1%} are work")
    setting = {"scenario": _SCENARIO, "steps": _STEPS, "actors": _ACTORS, "learner_gpus": _LEARNER_GPUS}
    record = described_run(["rlhfless"]) | {"setting": setting | {"time_scale": given.time_scale}}
    write_record({**record, **result}, given.json)


if __name__ == "__main__":
    main()
