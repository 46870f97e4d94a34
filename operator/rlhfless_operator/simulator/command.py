"""`rlhfless simulate`: which scenario or trace on which hardware, and a bar while it runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rlhfless_operator.planner.latency.drafting import Drafts
from rlhfless_operator.planner.latency.roofline import GPUS
from rlhfless_operator.simulator.asynchronous.compare import SYNCHRONOUS, compare
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS
from rlhfless_operator.simulator.page import WEIGHTS, scenario_page
from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.scenarios import GPU_HOUR, SCENARIOS, Scenario, find_scenario
from rlhfless_operator.simulator.simulate import Progress as Tell
from rlhfless_operator.simulator.simulate import simulate, step_count
from rlhfless_operator.simulator.traces import RecordedTrace, Trace, read_trace
from rlhfless_operator.training.costs.measured_drafts import measured_drafts
from rlhfless_operator.training.costs.model_shape import find_shape


@dataclass(frozen=True)
class Assumptions:
    """What differs from a scenario; None is the scenario's own."""

    model: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    gpus_per_instance: int | None = None
    gpu_hour: float | None = None
    cost_weight: float | None = None
    acceptance: float | None = None
    """Chance that a drafted token is right, where everybody drafts."""


def run_command(
    scenario: str | None,
    trace: str | None,
    assumptions: Assumptions,
    seeds: Sequence[int],
    html: Path | None,
) -> dict[str, Any]:
    """Simulate, and write a page if asked for.

    Args:
        trace: place of a run's trace, whose lengths are taken instead of the scenario's.

    Raises:
        ValueError: for a scenario, trace or assumption that can't be simulated, naming it.
    """
    found, lengths = _question(scenario, trace, assumptions)
    runs = 1 + (1 + len(WEIGHTS) / len(POLICIES) if html is not None else 0)
    total = round(step_count(found, lengths) * len(seeds) * len(POLICIES) * runs)
    with bar(total) as tell:
        result = simulate(found, seeds, trace=lengths, progress=tell)
        if html is not None:
            html.write_text(scenario_page(found, seeds, trace=lengths, result=result, progress=tell))
    return result


def run_async_command(
    scenario: str | None, trace: str | None, assumptions: Assumptions, seeds: Sequence[int]
) -> dict[str, Any]:
    """Compare asynchronous systems; the arguments and errors are those of `run_command`."""
    found, lengths = _question(scenario, trace, assumptions)
    total = len(SYNCHRONOUS) + len(SYSTEMS)
    with bar(total) as tell:
        return compare(found, seeds, trace=lengths, progress=lambda name: tell(1, total))


def _question(
    scenario: str | None, trace: str | None, assumptions: Assumptions
) -> tuple[Scenario, Trace | RecordedTrace | None]:
    """What is simulated, and the lengths of a run if they are taken from one."""
    if scenario is None and trace is None:
        raise ValueError(f"SCENARIO is missing: give --trace, or one of {', '.join(SCENARIOS)}")
    found = assume(find_scenario(scenario or next(iter(SCENARIOS))), assumptions)
    if trace is None:
        return found, None
    if assumptions.acceptance is None:
        found = replace(found, drafts=measured_drafts(trace))
    return replace(found, name=f"{Path(trace).name} on {found.gpus} × {found.gpu.name}"), read_trace(trace)


def assume(scenario: Scenario, assumptions: Assumptions) -> Scenario:
    """The scenario on other hardware.

    Raises:
        ValueError: naming the assumption.
    """
    changes: dict[str, Any] = {
        name: value
        for name in ("gpus", "gpus_per_instance", "gpu_hour", "cost_weight")
        if (value := getattr(assumptions, name)) is not None
    }
    if assumptions.acceptance is not None:
        changes["drafts"] = Drafts(1.0, assumptions.acceptance)
    if assumptions.model is not None:
        changes["model"] = find_shape(assumptions.model, "model")
    if assumptions.gpu is not None:
        if assumptions.gpu not in GPUS:
            raise ValueError(f"gpu is {assumptions.gpu!r}: choose one of {', '.join(GPUS)}")
        changes["gpu"] = GPUS[assumptions.gpu]
        if assumptions.gpu_hour is None and assumptions.gpu != scenario.gpu.name:
            if assumptions.gpu not in GPU_HOUR:
                raise ValueError(
                    f"gpu_hour is missing: no price of {assumptions.gpu} is known here, so give --gpu-hour"
                )
            changes["gpu_hour"] = GPU_HOUR[assumptions.gpu]
    assumed = replace(scenario, **changes)
    assumed.profile()
    return assumed


@contextmanager
def bar(total: int) -> Iterator[Tell]:
    """A bar on standard error, where that is a terminal, and what moves it on by a step."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=total)

        def tell(done: int, wanted: int) -> None:
            progress.advance(task)

        yield tell
