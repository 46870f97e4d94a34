"""A rehearsed job: what each instance did when.

    python benchmarks/simulator/rehearsal.py [--json benchmarks/simulator/results/rehearsal.json]

The driver, its plans and its moves are real; the GPUs are emulated. The job has the lengths and the model of the
simulator's scenario paper-3b-gsm8k-grpo. All seconds in the results are those of the real thing: what was measured,
divided by the time scale.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.shared.machine import describe_machine
from rlhfless_operator.simulator.scenarios import find_scenario
from rlhfless_operator.simulator.traces import write_trace

_SCENARIO = "paper-3b-gsm8k-grpo"
_STEPS = 4
_ACTORS = 8
_LEARNER_GPUS = 4
_TIME_SCALE = 0.25


def job(trace: Path, runs: Path) -> dict[str, Any]:
    """The job's document."""
    scenario = find_scenario(_SCENARIO)
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    return {
        "apiVersion": "rlhfless.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "rehearsal"},
        "spec": {
            "model": {"source": scenario.model.name},
            "data": {"source": str(trace)},
            "artifacts": {"uri": str(runs)},
            "rewards": [{"name": "right", "math": {}}],
            "algorithm": {"name": "grpo", "kl": {"coefficient": 0.001}},
            "sampling": {"maxPromptTokens": 1024, "maxResponseTokens": scenario.lengths.longest},
            "batch": {"promptsPerStep": scenario.prompts_per_step, "samplesPerPrompt": scenario.samples_per_prompt},
            "steps": _STEPS,
            "generation": {"instances": {"max": _ACTORS}, "pods": gpus},
            "preparation": {"pods": gpus},
            "learning": {
                "processes": _LEARNER_GPUS,
                "pods": {"resources": {"limits": {"nvidia.com/gpu": str(_LEARNER_GPUS)}}},
            },
            "rehearsal": {
                "trace": str(trace),
                "gpu": scenario.gpu.name,
                "startup": f"{scenario.startup_seconds:g}s",
                "weightLoad": f"{scenario.weight_load_seconds:g}s",
                "update": f"{scenario.update_seconds:g}s",
                "timeScale": _TIME_SCALE,
            },
        },
    }


def rehearse(folder: Path) -> dict[str, Any]:
    """Run the job in a folder; its steps, and the spans of its instances."""
    scenario, trace = find_scenario(_SCENARIO), folder / "trace.parquet"
    write_trace(trace, replace(scenario, epochs=-(-_STEPS // scenario.steps_per_epoch)).draw_trace(seed=0))
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
    if given.json is not None:
        setting = {"scenario": _SCENARIO, "steps": _STEPS, "actors": _ACTORS, "learner_gpus": _LEARNER_GPUS}
        document = {
            "command": "python benchmarks/simulator/rehearsal.py --json benchmarks/simulator/results/rehearsal.json"
        }
        document |= {"setting": setting | {"time_scale": _TIME_SCALE}}
        document |= describe_machine(["rlhfless"])
        given.json.write_text(json.dumps({**document, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
