"""The assumptions of `rlhfless simulate`: values that replace those of a scenario."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhfless_operator.planner.latency.drafting import Drafts
from rlhfless_operator.planner.latency.roofline import GPUS
from rlhfless_operator.simulator.scenarios import GPU_HOUR, SCENARIOS, Scenario, find_scenario, on_platform
from rlhfless_operator.simulator.traces import RecordedTrace, Trace, read_trace
from rlhfless_operator.training.costs.measured_drafts import measured_drafts
from rlhfless_operator.training.costs.model_shape import find_shape


@dataclass(frozen=True)
class Assumptions:
    """Values that replace those of a scenario; None keeps the scenario's own."""

    model: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    gpus_per_instance: int | None = None
    gpu_hour: float | None = None
    cost_weight: float | None = None
    acceptance: float | None = None
    """Chance that a drafted token is right; all policies then draft."""
    platform: str | None = None
    """Name of the platform whose starts instances have."""


def assumed_scenario(
    scenario: str | None, trace: str | None, assumptions: Assumptions
) -> tuple[Scenario, Trace | RecordedTrace | None]:
    """Return the scenario with the assumptions, and the trace of a run if there is one.

    Args:
        scenario: its name; the first one's if there is a trace.
        trace: place of a run's trace; its lengths replace the scenario's.

    Raises:
        ValueError: for a scenario, trace or assumption that can't be simulated, naming it.
    """
    if scenario is None and trace is None:
        raise ValueError(f"SCENARIO is missing: give --trace, or one of {', '.join(SCENARIOS)}")
    found = assume(find_scenario(scenario or next(iter(SCENARIOS))), assumptions)
    if trace is None:
        return found, None
    if assumptions.acceptance is None:
        found = replace(found, drafts=measured_drafts(trace))
    return replace(found, name=f"{Path(trace).name} on {found.gpus} × {found.gpu.name}"), read_trace(trace)


def assume(scenario: Scenario, assumptions: Assumptions) -> Scenario:
    """Return the scenario with these assumptions.

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
    if assumptions.platform is not None:
        scenario = on_platform(scenario, assumptions.platform)
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
