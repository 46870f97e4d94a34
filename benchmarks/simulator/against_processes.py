"""The simulator against real processes on emulated GPUs: the same trace and the same plans through both.

    python benchmarks/simulator/against_processes.py [--actors 16 64] [--time-scale 1] [--json FILE]

The real side is a rehearsal: the driver, its plans and moves, a process for each actor, HTTP streams, rollouts in
Parquet. Only the engine is emulated, and replays a trace at the pace of a latency model. The simulated side gets the
driver's plans. Both sides tell the time of a step's generation, from the first request for an instance to the last
sample, and its GPU-seconds, which are the ledger's.
"""

import argparse
import asyncio
import copy
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

from rich.console import Console
from rich.table import Table

from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import GSM8K_LENGTHS, job_on_l40s
from rlhfless_functions.api import Event, Samples, SampleTask
from rlhfless_functions.generation.rollout_files import FlushSchedule
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.job.actor_range import actor_range
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.moves.migration import Key, Migration
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.simulator.generation import Handling, run_generation
from rlhfless_operator.simulator.instance import Response
from rlhfless_operator.simulator.traces import LengthStatistics, Trace, generate, write_trace
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.driver import drive
from rlhfless_operator.training.instances.capacity import Capacity
from rlhfless_operator.training.requests.rehearsal import emulation_of
from rlhfless_operator.training.run import AvailableGpus
from rlhfless_operator.training.stages import rollout
from rlhfless_operator.training.stages.generation import generate as generate_samples

POLICIES: dict[str, dict[str, Any]] = {
    "even": {"policy": "even", "migration": {"policy": "none"}},
    "cost": {"policy": "cost", "lambda": 0.3, "migration": {"policy": "none"}},
    "cost, moves at 0.9 of an actor": {
        "policy": "cost", "lambda": 0.3, "migration": {"policy": "threshold", "ratio": 0.9},
    },
    "cost, moves that save": {"policy": "cost", "lambda": 0.3, "migration": {"policy": "benefit"}},
}  # fmt: skip
"""What each job's `planning` says."""


@dataclass
class ObservedStep:
    """Generation of a step, as the driver saw it. Times are monotonic seconds of this machine."""

    shares: Sequence[Sequence[SampleTask]]
    """The plan's."""
    migration: Migration
    """What decided on moves, as it was before the step."""
    outcome: GenerationOutcome
    ends: dict[Key, float] = field(default_factory=dict)
    """When each sample was announced."""
    instances: list[list[StateChange]] = field(default_factory=list)
    """What each of its instances went through."""


@dataclass(frozen=True)
class Side:
    """Generation of a step on one of the two sides."""

    seconds: float
    gpu_seconds: float
    moved: int
    ends: dict[Key, float]


def job_of(
    name: str, folder: Path, trace: Trace, actors: int, planning: dict[str, Any], time_scale: float, startup: float
) -> RLHFJob:
    """A rehearsal of a few steps, each over all prompts of the trace."""
    # The simulated stage has no step after it, for which instances could be kept.
    instances = {"min": actors if planning["policy"] == "even" else 1, "max": actors}
    return job_on_l40s(
        name,
        folder,
        prompts=trace.prompts,
        steps=trace.epochs,
        time_scale=time_scale,
        samples=trace.samples,
        longest=int(trace.response_tokens.max()),
        startup_seconds=startup,
        generation={"instances": instances, "keepAlive": "0s"},
        planning=planning,
    )


async def rehearse(job: RLHFJob, emulation: EmulationSettings, folder: Path) -> list[ObservedStep]:
    """Run the job; what its steps' generation did."""
    steps: list[ObservedStep] = []
    changes: dict[str, list[StateChange]] = {}
    root = folder / job.metadata.name

    def make_platform(on_state: Callable[[StateChange], None]) -> LocalPlatform:
        def observe(change: StateChange) -> None:
            if change.stage == "generation":
                changes.setdefault(change.instance, []).append(change)
            on_state(change)

        return LocalPlatform(
            keep_alive={"preparation": 3600.0, "learning": 3600.0},
            threads={},
            log_path=root / "instances.jsonl",
            on_state=observe,
            emulation=emulation,
        )

    def observed_generate(*arguments: Any, **named: Any) -> AsyncGenerator[Any, None]:
        _, shares, outcome, *_ = arguments
        # Rules remember what they have seen: the simulator's has to begin where the driver's does.
        step = ObservedStep(shares, copy.deepcopy(named["migration"]), outcome)
        steps.append(step)
        tell = named["on_event"]

        def on_event(actor: int, event: Event) -> None:
            if isinstance(event, Samples):
                now = time.monotonic()
                for sample in event.samples:
                    step.ends.setdefault((sample.prompt, sample.index), now)
            tell(actor, event)

        return generate_samples(*arguments, **{**named, "on_event": on_event})

    # What is warmed ahead loads the weights before, and then those that it generates with: what that costs, and what it
    # saves, is a matter of whole steps.
    not_ahead = patch.object(Capacity, "expect", AsyncMock())
    with patch.object(rollout, "generate", observed_generate), not_ahead:
        gpus = AvailableGpus(actor_range(job.spec))
        await drive(job, JobFolder(str(root)), make_platform, LiveProgress(), gpus)
    for instance in changes.values():
        mine = next(step for step in steps if instance[0].at < max(step.ends.values()))
        mine.instances.append(instance)
    return steps


def observed(step: ObservedStep, time_scale: float) -> Side:
    """What a step took, in emulated seconds."""
    asked = min(changes[0].at for changes in step.instances)
    assert all(changes[-1].state == "ended" for changes in step.instances)
    held = sum(changes[-1].at - changes[0].at for changes in step.instances)
    ends = {key: (at - asked) / time_scale for key, at in step.ends.items()}
    return Side(max(ends.values()), held / time_scale, step.outcome.moved, ends)


def simulated(step: ObservedStep, epoch: int, trace: Trace, emulation: EmulationSettings, job: RLHFJob) -> Side:
    """The same plan on simulated instances, with the rule that the driver had for moves.

    Simulated are this machine's seconds, in which the driver's rule looks about and has learnt its latencies.
    """
    shares = [
        [
            Response(
                each.prompt,
                each.index,
                int(trace.prompt_tokens[each.prompt]),
                int(trace.response_tokens[epoch, each.prompt, each.index]),
            )
            for each in share
        ]
        for share in step.shares
    ]
    profile = profile_of(emulation)
    handling = Handling(
        rule=step.migration._rule,
        max_moves=job.spec.planning.migration.moves_per_sample,
        pause_seconds=statistics.fmean(step.outcome.pauses) if step.outcome.pauses else 0.0,
        ready_seconds=profile.startup_seconds + profile.weight_load_seconds,
        flushes=lambda samples, now: FlushSchedule(samples, job.spec.generation.flush, now),
    )
    run = run_generation(shares, profile, step.migration._outlook, handling, max_batch=emulation.max_batch)
    scale = emulation.time_scale
    held = sum(each.end - each.begin for each in run.held)
    return Side(run.seconds / scale, held / scale, run.moves, {key: at / scale for key, at in run.ends.items()})


def profile_of(emulation: EmulationSettings) -> InstanceProfile:
    """The emulated instance as the simulator has it, in the seconds of this machine."""
    scale = emulation.time_scale
    latency = LinearLatency(
        emulation.step_seconds * scale,
        emulation.sequence_seconds * scale,
        emulation.context_seconds * scale,
        emulation.prefill_token_seconds * scale,
    )
    return InstanceProfile(
        latency, 1, emulation.kv_tokens, emulation.startup_seconds * scale, emulation.weight_load_seconds * scale
    )


def compare(
    actors: int,
    policy: str,
    *,
    statistics_of_lengths: LengthStatistics,
    prompts: int,
    samples: int,
    epochs: int,
    time_scale: float,
    startup: float,
    seed: int = 0,
) -> list[tuple[ObservedStep, Side, Side]]:
    """(what the driver saw, processes, simulator) for each step."""
    trace = generate(statistics_of_lengths, epochs=epochs, prompts=prompts, samples=samples, seed=seed)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        write_trace(folder / "trace.parquet", trace)
        job = job_of("rehearsal", folder, trace, actors, POLICIES[policy], time_scale, startup)
        emulation = emulation_of(job)
        assert emulation is not None
        # What is compared is generation: the other stages are to be over at once.
        emulation = emulation.model_copy(
            update={"preparation_token_seconds": 0.0, "learning_token_seconds": 0.0, "update_seconds": 0.0}
        )
        steps = asyncio.run(rehearse(job, emulation, folder))
        return [
            (step, observed(step, time_scale), simulated(step, epoch, trace, emulation, job))
            for epoch, step in enumerate(steps)
        ]


def row_of(actors: int, policy: str, step: int, real: Side, simulation: Side) -> dict[str, Any]:
    """A step of the table."""
    return {
        "actors": actors,
        "policy": policy,
        "step": step,
        "seconds": real.seconds,
        "simulated_seconds": simulation.seconds,
        "gpu_seconds": real.gpu_seconds,
        "simulated_gpu_seconds": simulation.gpu_seconds,
        "moved": real.moved,
        "simulated_moved": simulation.moved,
        "seconds_error": simulation.seconds / real.seconds - 1,
        "gpu_seconds_error": simulation.gpu_seconds / real.gpu_seconds - 1,
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """All rows for the terminal."""
    table = Table("actors", "policy", "step", "seconds", "simulated", "GPU-seconds", "simulated", "moved", "simulated")
    for row in rows:
        table.add_row(
            str(row["actors"]),
            row["policy"],
            str(row["step"]),
            f"{row['seconds']:.1f}",
            f"{row['simulated_seconds']:.1f} ({row['seconds_error']:+.1%})",
            f"{row['gpu_seconds']:.0f}",
            f"{row['simulated_gpu_seconds']:.0f} ({row['gpu_seconds_error']:+.1%})",
            str(row["moved"]),
            str(row["simulated_moved"]),
        )
    return table


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="The simulator against real processes on emulated GPUs.")
    parser.add_argument("--actors", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step for each actor")
    parser.add_argument("--epochs", type=int, default=2, help="steps of each run")
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds here for each emulated second")
    parser.add_argument("--startup", type=float, default=10.0, help="emulated seconds in which an instance starts")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    arguments = parser.parse_args()
    console = Console()
    rows: list[dict[str, Any]] = []
    for actors in arguments.actors:
        for policy in arguments.policies:
            sides = compare(
                actors,
                policy,
                statistics_of_lengths=GSM8K_LENGTHS,
                prompts=arguments.prompts * actors,
                samples=8,
                epochs=arguments.epochs,
                time_scale=arguments.time_scale,
                startup=arguments.startup,
            )
            rows += [row_of(actors, policy, step, *each) for step, (_, *each) in enumerate(sides, start=1)]
            console.print(table_of(rows[-len(sides) :]))
            write_record(_result(arguments, rows), arguments.json)
    console.print(table_of(rows))
    console.print(_result(arguments, rows)["summary"])


def _result(arguments: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def worst(name: str) -> float:
        return max(abs(row[name]) for row in rows)

    return {
        **described_run(["rlhfless"]),
        "time_scale": arguments.time_scale,
        "startup_seconds": arguments.startup,
        "summary": {
            name: {"worst": worst(name), "mean": statistics.fmean(abs(row[name]) for row in rows)}
            for name in ("seconds_error", "gpu_seconds_error")
        },
        "steps": list(rows),
    }


if __name__ == "__main__":
    main()
