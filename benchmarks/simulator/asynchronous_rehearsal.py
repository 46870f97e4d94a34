"""An asynchronous job in the simulator and in real processes on emulated GPUs: the same lengths, prompts and split.

    python benchmarks/simulator/asynchronous_rehearsal.py SCENARIO [--system rlhfless-async-1-switch-downweight]
        [--split 12 15 5] [--sequences 256] [--steps 14] [--time-scale 1] [--json FILE]

The job has the model, the GPUs and the lengths of a scenario, and the options of a system of `rlhfless simulate
--async`. By default the split is the best one for the first steps, as there. The simulator draws the prompts that the
job draws. Its learner publishes before the next step, because an emulated one does.

Figures are means of the steps in the middle, in emulated seconds. Actors are at work while they have samples.
GPU-seconds are of what is held: the simulator's instances that generate or prepare are let go for gaps that cost more
than a start with its load, and its learner stays. A run that FILE has with the same settings is not made again.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import job_of_scenario
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.groups.group_buffer import piece_size
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.step.bounds import least_held
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.simulator.asynchronous.compare import TUNING_STEPS, run_synchronous, tune
from rlhfless_operator.simulator.asynchronous.job import StageSeconds, Use, Work
from rlhfless_operator.simulator.asynchronous.live_job import LiveJob, Swaps
from rlhfless_operator.simulator.asynchronous.live_plans import LivePlans
from rlhfless_operator.simulator.asynchronous.rollouts import swap_seconds
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS, Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import Group, staleness_of
from rlhfless_operator.simulator.scenarios import Scenario, find_scenario
from rlhfless_operator.simulator.traces import Trace, write_trace
from rlhfless_operator.training.data.cursor import DataCursor
from rlhfless_operator.training.requests.rehearsal import emulation_of

BEGIN, END = 1, 1
"""Steps that are left out at each end: instances start in the first, and the last one learns from all that is left."""

START_SECONDS = 2.0
"""Emulated seconds in which an instance starts."""


def job_of(
    scenario: Scenario, system: Rollouts, split: Split, trace: Path, runs: Path, steps: int, time_scale: float
) -> dict[str, Any]:
    """The document of the rehearsed job."""
    document = job_of_scenario(
        scenario,
        "rehearsal",
        trace,
        steps=steps,
        learner_gpus=split.learner_gpus,
        startup_seconds=scenario.startup_seconds,
        time_scale=time_scale,
    )
    spec = document["spec"]
    spec["artifacts"] = {"uri": str(runs)}
    spec["generation"]["instances"] = {"max": split.instances}
    spec["preparation"]["instances"] = {"max": max(1, split.preparers)}
    spec["planning"] = {"lambda": scenario.cost_weight}
    spec["rehearsal"] |= {"maxBatch": split.sequences, "weightLoad": f"{swap_seconds(scenario):.3f}s"}
    spec["async"] = {
        "maxStaleness": system.max_staleness,
        "newWeights": system.new_weights,
        "tooStale": system.too_stale,
        **({} if system.recomputes else {"kvCache": "keep"}),
    }
    return document


def rehearse(document: dict[str, Any], folder: Path) -> list[StepRecord]:
    """Run the job with real processes."""
    file = folder / "job.json"
    file.write_text(json.dumps(document))
    rlhfless = "from rlhfless_operator.cli import main; main()"
    subprocess.run([sys.executable, "-c", rlhfless, "run", str(file)], check=True, cwd=folder, stdout=sys.stderr)
    lines = (folder / "runs" / "rehearsal" / "metrics.jsonl").read_text().splitlines()
    return [StepRecord.model_validate_json(line) for line in lines]


def measured(steps: Sequence[StepRecord], split: Split, own: int, scale: float) -> dict[str, float]:
    """Figures of a rehearsal's steps.

    Args:
        own: GPUs of an instance that generates or prepares.
    """
    gpus = {"generation": own, "preparation": own, "learning": split.learner_gpus}

    def mean(state: str, *stages: str) -> float:
        found = (
            gpus[name] * getattr(step.ledger[name], state) for step in steps for name in stages if name in step.ledger
        )
        return float(sum(found)) / len(steps) / scale

    return {
        "seconds": fmean(step.seconds for step in steps) / scale,
        "gpu_seconds": mean("seconds", *gpus),
        "preparers_held": mean("seconds", "preparation"),
        "actors_work": mean("busy", "generation"),
        "preparers_work": mean("busy", "preparation"),
        "learner_work": mean("busy", "learning"),
        "staleness": fmean(step.metrics["generation/staleness"] for step in steps),
    }


def drawn(job: RLHFJob, trace: Trace) -> Iterator[list[Group]]:
    """The groups of each rollout, in the order in which the job draws them, without end."""
    cursor, numbers = DataCursor(trace.prompts, job.spec.seed, shuffle=job.spec.data.shuffle), itertools.count()
    size = job.spec.batch.prompts_per_step
    for rollout in itertools.count():
        epoch = min(rollout * size // trace.prompts, trace.epochs - 1)
        yield [
            Group(
                next(numbers),
                prompt,
                int(trace.prompt_tokens[prompt]),
                tuple(int(tokens) for tokens in trace.response_tokens[epoch, prompt]),
            )
            for prompt in cursor.draw(size)
        ]


def simulate(scenario: Scenario, system: Rollouts, split: Split, job: RLHFJob, trace: Trace, steps: int) -> Work:
    """The whole job in the simulator, with the times of the emulated stages."""
    emulation = emulation_of(job)
    assert emulation is not None
    swap, history = swap_seconds(scenario), History()
    seconds = StageSeconds(
        weight_load=swap,
        preparation_token=emulation.preparation_token_seconds,
        learning_token=emulation.learning_token_seconds,
        update=emulation.update_seconds,
    )
    plans = LivePlans(scenario, system, split, history, swap, in_pieces=True)
    return LiveJob(
        system,
        scenario.prompts_per_step,
        seconds,
        plans,
        history,
        drawn(job, trace),
        profile=scenario.profile(),
        swaps=Swaps(swap, swap, system.recomputes),
        least=piece_size(scenario.prompts_per_step),
    ).until(steps)


def simulated(work: Work, split: Split, scenario: Scenario) -> dict[str, float]:
    """Figures of the same steps in the simulator."""
    begin, end = work.steps[BEGIN - 1].end, work.steps[-1 - END].end
    middle = list(enumerate(work.steps, start=1))[BEGIN:-END]
    own = scenario.gpus_per_instance
    start = scenario.startup_seconds + swap_seconds(scenario)

    def within(uses: Sequence[Use]) -> list[Use]:
        return [(max(begin, since), min(end, until)) for since, until in uses if since < end and until > begin]

    def busy(uses: Sequence[Use], gpus: int) -> float:
        return gpus * sum(until - since for since, until in within(uses)) / len(middle)

    def held(uses: Sequence[Use]) -> float:
        return own * least_held(within(uses), start_seconds=start, drain_seconds=0.0) / len(middle)

    return {
        "seconds": (end - begin) / len(middle),
        "gpu_seconds": held(work.generation)
        + held(work.preparation)
        + split.learner_gpus * (end - begin) / len(middle),
        "preparers_held": held(work.preparation),
        "actors_work": busy(work.generation, own),
        "preparers_work": busy(work.preparation, own),
        "learner_work": busy(work.learning, split.learner_gpus),
        "staleness": fmean(each for number, step in middle for each in staleness_of(number, step)),
    }


def compare(
    scenario: Scenario, system: Rollouts, split: Split | None, *, steps: int, sequences: int | None, time_scale: float
) -> dict[str, Any]:
    """Run both sides."""
    scenario = replace(scenario, epochs=-(-steps // scenario.steps_per_epoch), startup_seconds=START_SECONDS)
    trace = scenario.draw_trace(seed=0)
    if split is None:
        static = run_synchronous(scenario, "static", trace, 0, TUNING_STEPS)
        split = tune(scenario, system, trace, 0, min(steps, TUNING_STEPS), static=static)
    if sequences is not None:
        split = replace(split, sequences=sequences)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        write_trace(folder / "trace.parquet", trace)
        document = job_of(scenario, system, split, folder / "trace.parquet", folder / "runs", steps, time_scale)
        job = RLHFJob.model_validate(document)
        forecast = simulated(simulate(scenario, system, split, job, trace, steps), split, scenario)
        print(forecast, file=sys.stderr, flush=True)
        records = rehearse(document, folder)
    found = measured(records[BEGIN:-END], split, scenario.gpus_per_instance, time_scale)
    return {
        "split": {"instances": split.instances, "learner_gpus": split.learner_gpus, "preparers": split.preparers},
        "sequences": split.sequences,
        "actors": [record.plan["actors"] for record in records if record.plan is not None],
        "measured": found,
        "simulated": forecast,
        "step_seconds": [round(record.seconds / time_scale, 2) for record in records],
    }


def main() -> None:
    """Compare, print a table, and keep it where asked."""
    parser = argparse.ArgumentParser(description="An asynchronous job: the simulator beside real processes.")
    parser.add_argument("scenario")
    parser.add_argument("--system", default="rlhfless-async-1-switch-downweight")
    parser.add_argument("--split", type=int, nargs=3, metavar=("ACTORS", "LEARNER_GPUS", "PREPARERS"))
    parser.add_argument("--sequences", type=int, help="most of an actor's batch; by default the scenario's, or 64")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds here for each emulated one")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    scenario, system = find_scenario(given.scenario), SYSTEMS.get(given.system)
    if not isinstance(system, Rollouts):
        parser.error(f"--system: {given.system!r} is not one of ours")
    if given.steps <= BEGIN + END:
        parser.error(f"--steps: {given.steps} leaves no step to measure; write at least {BEGIN + END + 1}")
    actors, learner_gpus, preparers = given.split or (0, 0, 0)
    split = Split(actors, learner_gpus, scenario.max_batch, preparers) if given.split else None
    kept = json.loads(given.json.read_text())["runs"] if given.json and given.json.exists() else []
    setting = {name: value for name, value in vars(given).items() if name != "json"}
    row = next((each for each in kept if each["setting"] == setting), None)
    if row is None:
        found = compare(
            scenario, system, split, steps=given.steps, sequences=given.sequences, time_scale=given.time_scale
        )
        row = {**described_run(["numpy"]), "setting": setting, **found}
        write_record({"runs": [*kept, row]}, given.json)
    table = Table(given.scenario, "simulated", "measured", "simulated beside measured")
    for name, number in row["measured"].items():
        forecast = row["simulated"][name]
        table.add_row(name, f"{forecast:.4g}", f"{number:.4g}", f"{forecast / number - 1:+.1%}" if number else "")
    Console().print(table)


if __name__ == "__main__":
    main()
