"""Runs of policies on scenarios over seeds: the numbers, and the table."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from rlhfless_operator.simulator.policies import POLICIES, PolicySettings, find_policy
from rlhfless_operator.simulator.scenarios import Scenario, find_scenario
from rlhfless_operator.simulator.steps import StepResult, run_policy
from rlhfless_operator.simulator.traces import RecordedTrace, Trace

Progress = Callable[[int, int], None]
"""(steps done, steps in all)"""

METRICS = (
    "seconds",
    "gpu_seconds",
    "cost",
    "idle_share",
    "lower_bound_share",
    "generation_seconds",
    "generation_gpu_seconds",
    "generation_lower_bound_share",
    "instances",
    "moves",
    "lost",
)


def simulate(
    scenario: str | Scenario,
    seeds: Sequence[int],
    *,
    policies: Sequence[str] = tuple(POLICIES),
    trace: Trace | RecordedTrace | None = None,
    cost_weight: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run policies on a scenario.

    The figures are means of a training step. If there are several epochs, the first is left out, because lengths are
    learnt in it. Every policy sees the same lengths.

    Args:
        seeds: each makes a trace of its own, unless one is given.
        trace: lengths of a real run instead of the scenario's. Its steps are simulated as they were. If it has no
            steps, its prompts are drawn anew for each seed.
        cost_weight: λ instead of the scenario's.

    Returns:
        `{"scenario", "seeds", "policies": [{"policy", "seconds", "seconds_std", "gpu_seconds", …, "first_epoch":
        {"seconds", "gpu_seconds"}}]}`.

    Raises:
        ValueError: for a scenario, policy, seed list or trace that cannot be simulated, naming the field.
    """
    found = find_scenario(scenario) if isinstance(scenario, str) else scenario
    if cost_weight is not None:
        found = replace(found, cost_weight=cost_weight)
    chosen = [find_policy(name) for name in policies]
    variants: dict[str, PolicySettings] = {settings.name: settings for settings in chosen}
    return simulate_variants(found, seeds, variants, trace=trace, progress=progress)


def simulate_variants(
    scenario: Scenario,
    seeds: Sequence[int],
    variants: dict[str, PolicySettings],
    *,
    trace: Trace | RecordedTrace | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run policies given by their settings, as `simulate` does. `variants` has them by their names in the result.

    Raises:
        ValueError: for a seed list or trace that cannot be simulated.
    """
    if not seeds:
        raise ValueError("seeds is empty: give at least 1")
    if trace is not None:
        scenario = fitted(scenario, trace)
    total, done = step_count(scenario, trace) * len(seeds) * len(variants), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    by_policy: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    first_epochs: dict[str, list[StepResult]] = {name: [] for name in variants}
    for seed in seeds:
        lengths = trace or scenario.draw_trace(seed)
        for name, settings in variants.items():
            steps = run_policy(scenario, settings, lengths, seed, advance)
            first_epochs[name] += [step for step in steps if step.epoch == 0] or steps
            by_policy[name].append(_means(scenario, [step for step in steps if step.epoch > 0] or steps))
    return {
        "scenario": scenario.name,
        "seeds": list(seeds),
        "cost_weight": scenario.cost_weight,
        "policies": [
            {"policy": name, **_spread(runs), "first_epoch": _first_epoch(first_epochs[name])}
            for name, runs in by_policy.items()
        ],
    }


def table(result: dict[str, Any]) -> Table:
    """Return a result for the terminal, each policy beside the first."""
    view = Table(title=f"{result['scenario']}, {len(result['seeds'])} seeds, a step's means", title_justify="left")
    view.add_column("policy", overflow="fold")
    for heading in ("seconds", "GPU-seconds", "cost", "idle", "of the bound", "speed", "cheaper by", "first epoch"):
        view.add_column(heading, justify="right", overflow="fold")
    first = result["policies"][0]
    for row in result["policies"]:
        view.add_row(
            row["policy"],
            f"{row['seconds']:.1f} ± {row['seconds_std']:.1f}",
            f"{row['gpu_seconds']:,.0f} ± {row['gpu_seconds_std']:,.0f}",
            f"${row['cost']:.3f}",
            f"{row['idle_share']:.0%}",
            f"{row['lower_bound_share']:.0%}",
            f"{first['seconds'] / row['seconds']:.2f}×",
            f"{1 - row['gpu_seconds'] / first['gpu_seconds']:.0%}",
            _first_epoch_beside(row["first_epoch"], first["first_epoch"]),
        )
    return view


def _first_epoch_beside(own: dict[str, float], first: dict[str, float]) -> str:
    return f"{first['seconds'] / own['seconds']:.2f}×, {1 - own['gpu_seconds'] / first['gpu_seconds']:.0%}"


def step_count(scenario: Scenario, trace: Trace | RecordedTrace | None) -> int:
    """Return the number of steps of one policy on one seed."""
    if trace is None:
        return scenario.steps_per_epoch * scenario.epochs
    return trace.step_count(fitted(scenario, trace).prompts_per_step)


def _means(scenario: Scenario, steps: Sequence[StepResult]) -> dict[str, float]:
    held = fmean(step.gpu_seconds for step in steps)
    generation = fmean(step.generation_gpu_seconds for step in steps)
    return {
        "seconds": fmean(step.seconds for step in steps),
        "gpu_seconds": held,
        "cost": fmean(step.gpu_seconds for step in steps) / 3600 * scenario.gpu_hour,
        "idle_share": 1 - fmean(step.busy_gpu_seconds for step in steps) / held,
        "lower_bound_share": fmean(step.bound_gpu_seconds for step in steps) / held,
        "generation_seconds": fmean(step.generation_seconds for step in steps),
        "generation_gpu_seconds": generation,
        "generation_lower_bound_share": fmean(step.generation_bound_gpu_seconds for step in steps) / generation,
        "instances": fmean(step.instances for step in steps),
        "moves": fmean(step.moves for step in steps),
        "lost": fmean(step.lost for step in steps),
    }


def _first_epoch(steps: Sequence[StepResult]) -> dict[str, float]:
    return {
        "seconds": fmean(step.seconds for step in steps),
        "gpu_seconds": fmean(step.gpu_seconds for step in steps),
    }


def _spread(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the means over seeds, and their standard deviations: 0 for a single seed."""
    found: dict[str, float] = {}
    for name in METRICS:
        values = [run[name] for run in runs]
        found[name] = fmean(values)
        found[f"{name}_std"] = stdev(values) if len(values) > 1 else 0.0
    return found


def fitted(scenario: Scenario, trace: Trace | RecordedTrace) -> Scenario:
    """Return the scenario with a trace's sizes.

    Raises:
        ValueError: if all responses are empty.
    """
    longest = trace.longest
    if longest < 1:
        raise ValueError("response_tokens is 0 in every row of the trace: there is nothing to simulate")
    return replace(
        scenario,
        samples_per_prompt=trace.samples,
        prompts_per_step=(
            trace.prompts_per_step
            if isinstance(trace, RecordedTrace)
            else min(scenario.prompts_per_step, trace.prompts)
        ),
        lengths=replace(scenario.lengths, longest=longest),
    )
