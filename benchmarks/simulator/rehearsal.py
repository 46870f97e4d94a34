"""A rehearsed job, what each of its instances did when, and the same job in the simulator.

    python benchmarks/simulator/rehearsal.py [SCENARIO] [--actors 8] [--preparers 1] [--learner-gpus 4] [--steps 4]
        [--startup 2] [--time-scale 1] [--json FILE]

The driver, its plans and its moves are real; the GPUs are emulated. The job has the lengths and the model of a
scenario. Seconds are measured ones, divided by the time scale. The less that is, the more the time of this machine
weighs. It also prints the share of the GPU-seconds held that is work, from the second step on. Loading a learner's
state and saving it are no work. The simulator takes the same steps, with the same prompts, starts and publications.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import job_of_scenario
from benchmarks.simulator.asynchronous_rehearsal import START_SECONDS
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.simulator.own_stages import OwnStages
from rlhfless_operator.simulator.policies import find_policy
from rlhfless_operator.simulator.scenarios import SCENARIOS, Scenario, find_scenario
from rlhfless_operator.simulator.steps import Run
from rlhfless_operator.simulator.traces import RecordedTrace, Trace, TraceStep, write_trace
from rlhfless_operator.training.data.cursor import DataCursor


@dataclass(frozen=True)
class Setting:
    """The job."""

    scenario: str
    steps: int
    actors: int
    preparers: int | None
    """Most instances that prepare; None to leave it to the plan."""
    learner_gpus: int
    time_scale: float
    startup: float = START_SECONDS
    """Emulated seconds in which an instance starts."""
    checkpoint_every: int = 10
    """Steps between checkpoints."""


def job(scenario: Scenario, trace: Path, runs: Path, setting: Setting) -> dict[str, Any]:
    """Return the job's document."""
    document = job_of_scenario(
        scenario,
        "rehearsal",
        trace,
        steps=setting.steps,
        learner_gpus=setting.learner_gpus,
        startup_seconds=setting.startup,
        time_scale=setting.time_scale,
    )
    document["spec"]["artifacts"] = {"uri": str(runs)}
    document["spec"]["checkpoints"] = {"everySteps": setting.checkpoint_every}
    document["spec"]["generation"]["instances"] = {"max": setting.actors}
    if setting.preparers is not None:
        document["spec"]["preparation"]["instances"] = {"max": setting.preparers}
    return document


def rehearse(folder: Path, setting: Setting) -> dict[str, Any]:
    """Run the job in a folder; its steps, the spans of its instances, and the steps in the simulator."""
    scenario, time_scale = scenario_of(setting), setting.time_scale
    trace, lengths = folder / "trace.parquet", scenario.draw_trace(seed=0)
    write_trace(trace, lengths)
    file, runs = folder / "job.json", folder / "runs"
    file.write_text(json.dumps(job(scenario, trace, runs, setting)))
    forecast = simulated(setting)
    rlhfless = "from rlhfless_operator.cli import main; main()"
    subprocess.run([sys.executable, "-c", rlhfless, "run", str(file)], check=True, cwd=folder, stdout=sys.stderr)
    metrics, ledger = (_lines(runs / "rehearsal" / name) for name in ("metrics.jsonl", "ledger.jsonl"))
    spans = [
        {**span, "start": round(span["start"] / time_scale, 2), "end": round(span["end"] / time_scale, 2)}
        for span in ledger
    ]
    return {"steps": [_step(record, setting) for record in metrics], "simulated": forecast, "spans": spans}


def scenario_of(setting: Setting) -> Scenario:
    """Return the scenario, with epochs enough for all steps."""
    scenario = find_scenario(setting.scenario)
    return replace(scenario, epochs=-(-setting.steps // scenario.steps_per_epoch))


def drawn(document: RLHFJob, trace: Trace, steps: int) -> RecordedTrace:
    """Return the lengths of the steps, with the prompts that the job draws."""
    cursor, size = DataCursor(trace.prompts, document.spec.seed, shuffle=document.spec.data.shuffle), 0
    recorded = []
    for _ in range(steps):
        epoch, prompts = size // trace.prompts, cursor.draw(document.spec.batch.prompts_per_step)
        size += len(prompts)
        recorded.append(TraceStep(epoch, {each: trace.response_tokens[epoch, each].tolist() for each in prompts}))
    return RecordedTrace(trace.prompt_tokens, recorded)


@dataclass(frozen=True)
class _Rehearsed(Scenario):
    """A scenario on processes. A new actor loads a model before the step's weights are there; a preparer does not."""

    @property
    def preparer_start_seconds(self) -> float:
        return super().preparer_start_seconds - self.weight_load_seconds


def simulated(setting: Setting) -> list[dict[str, Any]]:
    """Return the steps in the simulator, on GPUs enough for all instances."""
    scenario = scenario_of(setting)
    document = RLHFJob.model_validate(job(scenario, Path("trace"), Path("runs"), setting))
    lengths = drawn(document, scenario.draw_trace(seed=0), setting.steps)
    scenario = replace(
        _Rehearsed(**{each.name: getattr(scenario, each.name) for each in fields(scenario)}),
        gpus=(setting.actors + 1) * scenario.gpus_per_instance + setting.learner_gpus,
        startup_seconds=setting.startup + scenario.weight_load_seconds,
        trainer_start_seconds=setting.startup,
        sleeps=False,
        # The emulated learner publishes within its update.
        publishing_seconds=0.0,
        store_rate=1e18,
    )
    run = Run(scenario, find_policy("rlhfless"), lengths, 0, OwnStages(scenario, setting.learner_gpus, follows=True))
    found = [run.step(groups) for groups in lengths.steps(0, np.random.default_rng(0))]
    return [
        {"seconds": round(each.seconds, 2), "gpu_seconds": round(each.gpu_seconds, 1), "actors": each.instances}
        for each in found
    ]


def _step(record: dict[str, Any], setting: Setting) -> dict[str, Any]:
    time_scale, own = setting.time_scale, find_scenario(setting.scenario).gpus_per_instance
    gpus = {"generation": own, "preparation": own, "learning": setting.learner_gpus}
    ledger = StepRecord.model_validate(record).ledger
    held = sum(gpus[stage] * spent.seconds for stage, spent in ledger.items())
    stages = {name: round(value / time_scale, 2) for name, value in record["stages"].items()}
    taking_up = sum(record["metrics"].get(f"seconds/{part}", 0.0) for part in ("load", "replay"))
    return {
        "step": record["step"],
        "seconds": round(record["seconds"] / time_scale, 2),
        "gpu_seconds": round(held / time_scale, 1),
        "stages": stages,
        "actors": record["plan"]["actors"],
        "preparers": record["plan"]["preparers"],
        "holds": bool(record["plan"].get("holds")),
        "taking_up": round(taking_up / time_scale, 2),
    }


def gpu_seconds(result: dict[str, Any], setting: Setting) -> dict[str, dict[str, float]]:
    """Return the GPU-seconds of each stage from the second step on, by state; `work` is what is left of `busy` without
    the seconds in which learners load their state or repeat steps."""
    steps, found = result["steps"], dict[str, dict[str, float]]()
    own, learner_gpus = find_scenario(setting.scenario).gpus_per_instance, setting.learner_gpus
    ends = sorted(span["end"] for span in result["spans"] if span["stage"] == "learning" and span["state"] == "busy")
    since = next(end for end in ends if end >= steps[0]["seconds"] - 1)
    for span in result["spans"]:
        seconds = max(0.0, span["end"] - max(since, span["start"]))
        if span["state"] != "asleep" and seconds:
            stage, gpus = span["stage"], learner_gpus if span["stage"] == "learning" else own
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
    parser.add_argument("scenario", nargs="?", default=next(iter(SCENARIOS)))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--actors", type=int, default=8, help="most of them")
    parser.add_argument("--preparers", type=int, default=None, help="most of them; by default the plan's choice")
    parser.add_argument("--learner-gpus", type=int, default=4)
    parser.add_argument("--startup", type=float, default=START_SECONDS, help="seconds in which an instance starts")
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds here for each emulated one")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    given = parser.parse_args()
    options = {name: value for name, value in vars(given).items() if name != "json"}
    setting = Setting(**options)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        result = rehearse(Path(name), setting)
    for step, forecast in zip(result["steps"], result["simulated"], strict=True):
        seconds, held = (forecast[name] / step[name] - 1 for name in ("seconds", "gpu_seconds"))
        print(
            f"step {step['step']}: {step['seconds']:.1f} s (simulated {seconds:+.1%}), {step['gpu_seconds']:.0f}"
            f" GPU-seconds ({held:+.1%}), {step['actors']} actors ({forecast['actors']}), {step['preparers']} prepare"
            f"{', all stay' if step['holds'] else ''}"
        )
    for name in ("seconds", "gpu_seconds"):
        real, forecast = (sum(each[name] for each in result[side][1:]) for side in ("steps", "simulated"))
        print(f"{name} from the second step on: {real:.0f}, simulated {forecast:.0f} ({forecast / real - 1:+.1%})")
    held, work = 0.0, 0.0
    for stage, by_state in gpu_seconds(result, setting).items():
        of_stage = sum(seconds for state, seconds in by_state.items() if state != "work")
        held, work = held + of_stage, work + by_state["work"]
        states = ", ".join(f"{state} {seconds:.0f}" for state, seconds in by_state.items())
        print(
            f"{stage}: {of_stage:.0f} GPU-seconds from the second step on ({states}): {by_state['work'] / of_stage:.0%}"
        )
    print(f"all stages: {held:.0f} GPU-seconds, of which {work / held:.1%} are work")
    record = described_run(["rlhfless"]) | {"setting": asdict(setting)}
    write_record({**record, **result}, given.json)


if __name__ == "__main__":
    main()
