"""The simulator's forecast of asynchronous jobs, beside real processes on emulated GPUs.

    python benchmarks/simulator/asynchronous_forecast.py MEASURED.json ... [--json FILE]

Each file is a result of `asynchronous/against_synchronous.py`, and has the settings. Its jobs with split GPUs are
simulated with the same trace, order of prompts, latencies and times of the stages. Figures are means of the same steps.
The simulator moves no sample between actors, so jobs with `repack` are left out. It has no requests, files and
processes.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.asynchronous.against_synchronous import COLOCATED, ENDS, job_of, split_of
from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import GSM8K_LENGTHS
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.lengths import LengthPredictor
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, plan
from rlhfless_operator.simulator.asynchronous.job import AsynchronousJob, StageSeconds, Use, Work
from rlhfless_operator.simulator.asynchronous.shares_job import ends_of_shares
from rlhfless_operator.simulator.asynchronous.systems import Rollouts
from rlhfless_operator.simulator.asynchronous.work import Group, StepShares
from rlhfless_operator.simulator.traces import Trace, generate, write_trace
from rlhfless_operator.training.data.cursor import DataCursor
from rlhfless_operator.training.requests.rehearsal import emulation_of

COMPARED = (
    "step_seconds",
    "steps_an_hour",
    "owned_gpu_seconds",
    "generation_seconds",
    "actors_busy_seconds",
    "learner_busy_seconds",
    "actors_idle",
    "learner_idle",
    "staleness_mean",
)
"""Figures of both sides, as against_synchronous.py has them."""


class EvenPlans:
    """The `even` policy of a job, which orders each actor's samples by the lengths that earlier steps had."""

    def __init__(self, actors: int, profile: InstanceProfile, sequences: int, longest: int) -> None:
        self._profile, self._sequences, self._longest = profile, sequences, longest
        self._limits = Limits(actors, actors, profile.kv_tokens, sequences)
        self._predictor = LengthPredictor(default_tokens=longest / 2, longest=longest)

    def plan(self, groups: Sequence[Group]) -> StepShares:
        """The plan of the next rollout."""
        loads = [
            SampleLoad(group.number, index, group.prompt_tokens, tokens)
            for group in groups
            for index, tokens in enumerate(
                self._predictor.predict(group.prompt).group(len(group.lengths), self._longest)
            )
        ]
        shares = plan("even", loads, self._profile.latency, self._limits).shares
        return StepShares(ends_of_shares(shares, groups, self._profile, self._sequences))

    def observe(self, groups: Sequence[Group]) -> None:
        """A rollout's groups are complete."""
        for group in groups:
            self._predictor.observe(group.prompt, group.lengths)


def drawn(job: RLHFJob, trace: Trace) -> Iterator[list[Group]]:
    """The groups of each rollout, in the order in which the job draws them."""
    cursor = DataCursor(trace.prompts, job.spec.seed, shuffle=job.spec.data.shuffle)
    numbers = count()
    for epoch in range(trace.epochs):
        yield [
            Group(
                next(numbers),
                prompt,
                int(trace.prompt_tokens[prompt]),
                tuple(int(tokens) for tokens in trace.response_tokens[epoch, prompt]),
            )
            for prompt in cursor.draw(job.spec.batch.prompts_per_step)
        ]


def forecast(job: RLHFJob, emulation: EmulationSettings, trace: Trace) -> Work:
    """The whole job."""
    latency = LinearLatency(
        emulation.step_seconds, emulation.sequence_seconds, emulation.context_seconds, emulation.prefill_token_seconds
    )
    profile = InstanceProfile(latency, 1, emulation.kv_tokens, emulation.startup_seconds, emulation.weight_load_seconds)
    seconds = StageSeconds(
        weight_load=emulation.weight_load_seconds,
        preparation_token=emulation.preparation_token_seconds,
        learning_token=emulation.learning_token_seconds,
        # An emulated learner publishes before the next step.
        update=emulation.update_seconds,
    )
    settings = job.spec.asynchronous
    # A job that begins each rollout with the weights of the step before is synchronous.
    system = Rollouts("any", "any", settings.max_staleness if settings is not None else 0)
    plans = EvenPlans(
        job.spec.generation.instances.max or 1, profile, emulation.max_batch, job.spec.sampling.max_response_tokens
    )
    size, steps = job.spec.batch.prompts_per_step, trace.epochs
    return AsynchronousJob(system, size, seconds, plans, History(), drawn(job, trace), total=steps).until(steps)


def summarize(work: Work, actors: int, gpus: int) -> dict[str, float]:
    """Figures of the steps in the middle, as against_synchronous.py has them."""
    begin, end = work.steps[ENDS - 1].end, work.steps[-1 - ENDS].end
    middle = work.steps[ENDS:-ENDS]
    seconds, steps = end - begin, len(middle)

    def busy(uses: Sequence[Use]) -> float:
        return sum(max(0.0, min(until, end) - max(since, begin)) for since, until in uses)

    stale = [ENDS + place - min(step.versions) for place, step in enumerate(middle)]
    return {
        "step_seconds": seconds / steps,
        "steps_an_hour": 3600 * steps / seconds,
        "owned_gpu_seconds": gpus * seconds / steps,
        "generation_seconds": float(np.mean([until - since for since, until in work.rollouts if begin < until <= end])),
        "actors_busy_seconds": busy(work.generation) / steps,
        "learner_busy_seconds": busy(work.learning) / steps,
        "actors_idle": 1 - busy(work.generation) / (actors * seconds),
        "learner_idle": 1 - busy(work.learning) / seconds,
        "staleness_mean": float(np.mean(stale)),
    }


def compare(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each job of a result of against_synchronous.py."""
    arguments = argparse.Namespace(**measured["settings"])
    rows = []
    for arm, run in measured["runs"].items():
        if arm in COLOCATED or "repack" in arm:
            continue
        with tempfile.TemporaryDirectory(prefix="forecast-") as name:
            prompts = arguments.prompts * arguments.gpus
            trace = generate(GSM8K_LENGTHS, epochs=arguments.steps, prompts=prompts, samples=8, seed=0)
            write_trace(Path(name) / "trace.parquet", trace)
            job = job_of(arm, Path(name), arguments)
            emulation = emulation_of(job)
            assert emulation is not None
            found = summarize(forecast(job, emulation, trace), split_of(arm, arguments)[0], arguments.gpus)
        rows.append(
            {
                "arm": arm,
                "learner_gpus": arguments.learner_gpus,
                "forecast": found,
                "measured": {figure: run[figure] for figure in COMPARED if figure in run},
                "moved_samples": run["moved_samples"],
                "step_seconds_error": found["step_seconds"] / run["step_seconds"] - 1,
            }
        )
    return rows


def main() -> None:
    """Compare, print a table, and keep it where asked."""
    parser = argparse.ArgumentParser(description="Asynchronous jobs: a forecast beside real processes.")
    parser.add_argument("measured", type=Path, nargs="+", help="results of against_synchronous.py")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    rows = [row for path in arguments.measured for row in compare(json.loads(path.read_text()))]
    table = Table("job, forecast (measured)", "learner's GPUs", *COMPARED)
    for row in rows:
        cells = (
            f"{value:.3g} ({row['measured'].get(figure, math.nan):.3g})" for figure, value in row["forecast"].items()
        )
        table.add_row(row["arm"], str(row["learner_gpus"]), *cells)
    Console(width=200).print(table)
    if arguments.json:
        write_record({**described_run(["numpy"]), "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
