"""A rehearsed job, and what each of its instances did when.

    python benchmarks/simulator/rehearsal.py [--actors 8] [--preparers 1] [--learner-gpus 4] [--json FILE]

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import job_of_scenario, write_trace_of
from rlhfless_operator.simulator.scenarios import find_scenario

_SCENARIO = "paper-3b-gsm8k-grpo"
_STEPS = 4


@dataclass(frozen=True)
class Setting:
    """The instances of the job."""

    actors: int
    preparers: int | None
    """Most instances that prepare; None to leave it to the plan."""
    learner_gpus: int
    time_scale: float


def job(trace: Path, runs: Path, setting: Setting) -> dict[str, Any]:
    """Return the job's document."""
    scenario = find_scenario(_SCENARIO)
    document = job_of_scenario(
        scenario,
        "rehearsal",
        trace,
        steps=_STEPS,
        learner_gpus=setting.learner_gpus,
        startup_seconds=scenario.startup_seconds,
        time_scale=setting.time_scale,
    )
    document["spec"]["artifacts"] = {"uri": str(runs)}
    document["spec"]["generation"]["instances"] = {"max": setting.actors}
    if setting.preparers is not None:
        document["spec"]["preparation"]["instances"] = {"max": setting.preparers}
    return document


def rehearse(folder: Path, setting: Setting) -> dict[str, Any]:
    """Run the job in a folder; its steps, and the spans of its instances."""
    trace, time_scale = folder / "trace.parquet", setting.time_scale
    write_trace_of(find_scenario(_SCENARIO), _STEPS, trace, seed=0)
    file, runs = folder / "job.json", folder / "runs"
    file.write_text(json.dumps(job(trace, runs, setting)))
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
        "preparers": record["plan"]["preparers"],
        "taking_up": round(taking_up / time_scale, 2),
    }


def gpu_seconds(result: dict[str, Any], learner_gpus: int) -> dict[str, dict[str, float]]:
    """Return the GPU-seconds of each stage from the second step on, by state; `work` is what is left of `busy` without
    the seconds in which learners load their state or repeat steps."""
    steps, found = result["steps"], dict[str, dict[str, float]]()
    ends = sorted(span["end"] for span in result["spans"] if span["stage"] == "learning" and span["state"] == "busy")
    since = next(end for end in ends if end >= steps[0]["seconds"] - 1)
    for span in result["spans"]:
        seconds = max(0.0, span["end"] - max(since, span["start"]))
        if span["state"] != "asleep" and seconds:
            stage, gpus = span["stage"], learner_gpus if span["stage"] == "learning" else 1
            by_state = found.setdefault(stage, {})
            by_state[span["state"]] = by_state.get(span["state"], 0.0) + gpus * seconds
    for stage, by_state in found.items():
        taking_up = sum(step["taking_up"] for step in steps[1:]) if stage == "learning" else 0.0
        by_state["work"] = by_state.get("busy", 0.0) - learner_gpus * taking_up
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    """Rehearse, print a line for each step, and write the file."""
    parser = argparse.ArgumentParser(description="A rehearsed job.")
    parser.add_argument("--actors", type=int, default=8, help="most of them")
    parser.add_argument("--preparers", type=int, default=None, help="most of them; by default the plan's choice")
    parser.add_argument("--learner-gpus", type=int, default=4)
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds here for each emulated one")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    given = parser.parse_args()
    setting = Setting(given.actors, given.preparers, given.learner_gpus, given.time_scale)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        result = rehearse(Path(name), setting)
    for step in result["steps"]:
        print(f"step {step['step']}: {step['seconds']:.1f} s, {step['actors']} actors, {step['preparers']} prepare")
    held, work = 0.0, 0.0
    for stage, by_state in gpu_seconds(result, setting.learner_gpus).items():
        of_stage = sum(seconds for state, seconds in by_state.items() if state != "work")
        held, work = held + of_stage, work + by_state["work"]
        states = ", ".join(f"{state} {seconds:.0f}" for state, seconds in by_state.items())
        print(
            f"{stage}: {of_stage:.0f} GPU-seconds from the second step on ({states}): {by_state['work'] / of_stage:.0%}"
        )
    print(f"all stages: {held:.0f} GPU-seconds, of which {work / held:.1%} are work")
    about = {"scenario": _SCENARIO, "steps": _STEPS, **asdict(setting)}
    record = described_run(["rlhfless"]) | {"setting": about}
    write_record({**record, **result}, given.json)


if __name__ == "__main__":
    main()
