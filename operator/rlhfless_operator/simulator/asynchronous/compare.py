"""Synchronous and asynchronous systems on a scenario: each tuned, with its staleness, its idle time and its bound."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any

from rich.table import Table

from rlhfless_operator.planner.step.preparers import matching_preparers
from rlhfless_operator.simulator.asynchronous.bound import least_seconds, whole_cluster_seconds
from rlhfless_operator.simulator.asynchronous.rollouts import run_rollouts
from rlhfless_operator.simulator.asynchronous.streaming import run_streaming
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS, Rollouts, Split, Streaming, System
from rlhfless_operator.simulator.asynchronous.work import Outcome, draw_steps
from rlhfless_operator.simulator.policies import find_policy
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.simulate import fitted
from rlhfless_operator.simulator.steps import StepResult, run_policy
from rlhfless_operator.simulator.traces import RecordedTrace, Trace

SYNCHRONOUS = ("static", "rlhfless")
"""Synchronous policies beside the asynchronous systems. Speeds are relative to the first."""
SHARES = (1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Parts of the cluster to try for generation."""
SEQUENCES = 64
"""Most sequences that an instance decodes at a time: tried besides the scenario's own limit."""
TUNING_STEPS = 8
"""Number of steps of the runs that choose a split."""
Progress = Callable[[str], None]
"""Called for each run that is done."""


def run_system(
    scenario: Scenario, system: System, split: Split, trace: Trace | RecordedTrace, seed: int, steps: int
) -> Outcome:
    """Run the first `steps` steps of one system. Nothing is generated before the first step begins."""
    batches = draw_steps(scenario, trace, seed)
    if isinstance(system, Streaming):
        return run_streaming(scenario, system, split, batches, steps)
    return run_rollouts(scenario, system, split, batches, steps)


def splits(scenario: Scenario, system: System) -> list[Split]:
    """Return the splits of all GPUs to try for a system.

    Raises:
        ValueError: for a cluster without room for all stages of the system.
    """
    own = scenario.gpus_per_instance if isinstance(system, Rollouts) and system.preparers else 0
    instances = {max(1, round(share * scenario.instances)) for share in SHARES}
    found = []
    for count in sorted(instances):
        left = scenario.gpus - count * scenario.gpus_per_instance
        if left > own:
            preparers = _preparers(scenario, system, left)
            found.append(Split(count, left - preparers * scenario.gpus_per_instance, scenario.max_batch, preparers))
    if not found:
        raise ValueError(
            f"gpus is {scenario.gpus}: {system.name} generates, prepares and learns on different ones;"
            f" the least is {own + scenario.gpus_per_instance + 1}"
        )
    return found


def _preparers(scenario: Scenario, system: System, gpus: int) -> int:
    """Return the fewest preparation instances that don't delay a learner on the rest of these GPUs.

    Args:
        gpus: at least one more than an instance has.
    """
    if not isinstance(system, Rollouts) or not system.preparers:
        return 0
    each = scenario.gpus_per_instance
    most = min(system.preparers, (gpus - 1) // each)
    for count in range(1, most):
        learning = scenario.learning_gpu_seconds(1.0) / (gpus - count * each)
        work = scenario.preparation_gpu_seconds(1.0) / each
        if matching_preparers(work, generation=0.0, learning=learning, least=1, most=most).instances <= count:
            return count
    return most


def tune(
    scenario: Scenario,
    system: System,
    trace: Trace | RecordedTrace,
    seed: int,
    steps: int,
    *,
    static: Sequence[StepResult],
) -> Split:
    """Return the best split for a system: the least sum of time and cost, each relative to static actors.

    Splits are tried from few instances to many, until two in a row are worse than the best.

    Args:
        static: the same number of steps of static actors.
    """
    time, cost = sum(step.seconds for step in static), sum(step.gpu_seconds for step in static)

    def badness(split: Split) -> float:
        outcome = run_system(scenario, system, split, trace, seed, steps)
        return outcome.seconds / time + outcome.gpu_seconds / cost

    first, *more = splits(scenario, system)
    best, least, worse = first, badness(first), 0
    for split in more:
        if (found := badness(split)) < least:
            best, least, worse = split, found, 0
        else:
            worse += 1
        if worse == 2:
            break
    fewer = replace(best, sequences=min(SEQUENCES, scenario.max_batch))
    return fewer if badness(fewer) < least else best


def run_synchronous(
    scenario: Scenario, policy: str, trace: Trace | RecordedTrace, seed: int, steps: int
) -> list[StepResult]:
    """Run the first `steps` steps of a synchronous policy, or fewer if the trace has fewer."""
    return run_policy(scenario, find_policy(policy), trace, seed)[:steps]


def compare(
    scenario: Scenario,
    seeds: Sequence[int],
    *,
    systems: Mapping[str, System] = SYSTEMS,
    synchronous: Sequence[str] = SYNCHRONOUS,
    steps: int = 24,
    trace: Trace | RecordedTrace | None = None,
    progress: Progress = lambda name: None,
) -> dict[str, Any]:
    """Run synchronous policies and asynchronous systems over the same lengths.

    Figures are means of a step over whole runs, the first steps included. Each system has its best split for the first
    steps of the first seed.

    Args:
        synchronous: synchronous policies; the first is static actors.
        steps: number of steps of each run.
        trace: lengths of a real run instead of the scenario's.

    Returns:
        `{"scenario", "seeds", "steps", "policies": [{"policy", "seconds", "gpu_seconds", …}]}`.

    Raises:
        ValueError: for no seeds, or a trace or a cluster that cannot be simulated.
    """
    if not seeds:
        raise ValueError("seeds is empty: give at least 1")
    if trace is not None:
        scenario = fitted(scenario, trace)
        steps = min(steps, trace.step_count(scenario.prompts_per_step))
    else:
        scenario = replace(scenario, epochs=-(-steps // scenario.steps_per_epoch))
    traces = {seed: trace or scenario.draw_trace(seed) for seed in seeds}
    rows: list[dict[str, Any]] = []
    first: list[StepResult] = []
    for policy in synchronous:
        runs = [run_synchronous(scenario, policy, traces[seed], seed, steps) for seed in seeds]
        found = [_synchronous_row(scenario, run, traces[seed], seed) for seed, run in zip(seeds, runs, strict=True)]
        rows.append({"policy": policy, **_means(found)})
        first = first or runs[0]
        progress(policy)
    tuning = min(steps, TUNING_STEPS)
    for name, system in systems.items():
        split = tune(scenario, system, traces[seeds[0]], seeds[0], tuning, static=first[:tuning])
        found = [_row(scenario, system, split, traces[seed], seed, steps) for seed in seeds]
        tuned = {
            "instances": split.instances,
            "learner_gpus": split.learner_gpus,
            "sequences": split.sequences,
            "preparers": split.preparers,
        }
        rows.append({"policy": name, **_means(found), "split": tuned})
        progress(name)
    return {"scenario": scenario.name, "seeds": list(seeds), "steps": steps, "policies": rows}


def _row(
    scenario: Scenario, system: System, split: Split, trace: Trace | RecordedTrace, seed: int, steps: int
) -> dict[str, float]:
    outcome = run_system(scenario, system, split, trace, seed, steps)
    taken = [step.groups for step in outcome.steps]
    most, regroups = max(outcome.staleness), isinstance(system, Streaming)
    beside = isinstance(system, Rollouts)
    bound = least_seconds(scenario, split, taken, most, regroups=regroups, publishes_beside=beside)
    anyone = whole_cluster_seconds(scenario, taken, most, regroups=regroups)
    return {
        "seconds": outcome.seconds / steps,
        "gpu_seconds": outcome.gpu_seconds / steps,
        "staleness": fmean(outcome.staleness),
        "most_stale": most,
        "generation_idle": 1 - outcome.generation_busy / outcome.generation_held,
        "learner_idle": 1 - outcome.learner_busy / outcome.learner_held,
        "of_bound": bound / outcome.seconds,
        "of_cluster_bound": anyone / outcome.seconds,
    }


def _synchronous_row(
    scenario: Scenario, found: Sequence[StepResult], trace: Trace | RecordedTrace, seed: int
) -> dict[str, float]:
    seconds = sum(step.seconds for step in found)
    batches: Iterator[Any] = islice(draw_steps(scenario, trace, seed), len(found))
    bound = whole_cluster_seconds(scenario, list(batches), 0)
    return {
        "seconds": seconds / len(found),
        "gpu_seconds": fmean(step.gpu_seconds for step in found),
        "staleness": 0.0,
        "most_stale": 0,
        "of_bound": bound / seconds,
        "of_cluster_bound": bound / seconds,
    }


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over seeds, and the greatest of the greatest staleness."""
    means = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return means | {"most_stale": max(row["most_stale"] for row in rows), "steps_an_hour": 3600 / means["seconds"]}


def table(result: Mapping[str, Any]) -> Table:
    """Return a result for the terminal, each row beside the first."""
    seeds = len(result["seeds"])
    view = Table(title=f"{result['scenario']}, {seeds} seeds, means of {result['steps']} steps", title_justify="left")
    view.add_column("policy")
    for heading in HEADINGS:
        view.add_column(heading, justify="right")
    for row in result["policies"]:
        view.add_row(row["policy"], *cells(row, result["policies"][0]))
    return view


HEADINGS = (
    "seconds",
    "steps an hour",
    "GPU-seconds",
    "speed",
    "staleness, most",
    "idle: generation, learner",
    "of its bound, of anyone's",
    "instances, learner's GPUs, batch, preparers",
)
"""Headings of the columns after the name."""


def cells(row: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """Return a row's cells under `HEADINGS`, beside the first row."""
    split = row.get("split")
    idle = f"{row['generation_idle']:.0%}, {row['learner_idle']:.0%}" if split else ""
    return [
        f"{row['seconds']:.1f}",
        f"{row['steps_an_hour']:.0f}",
        f"{row['gpu_seconds']:,.0f}",
        f"{first['seconds'] / row['seconds']:.2f}×",
        f"{row['staleness']:.2f}, {row['most_stale']}",
        idle,
        f"{row['of_bound']:.0%}, {row['of_cluster_bound']:.0%}",
        ", ".join(str(each) for each in split.values() if each) if split else "",
    ]
