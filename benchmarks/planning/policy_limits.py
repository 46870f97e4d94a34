"""The limits of every policy in a scenario: the fewest GPU-seconds of a step within a given time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.step_bound import least_gpu_seconds
from rlhfless_operator.simulator.steps import run_policy
from rlhfless_operator.simulator.traces import generate

_PRECISION = 1e-3


@dataclass(frozen=True)
class Reach:
    """The two ends of what is possible beside a step that takes some seconds and GPU-seconds."""

    saving: float | None
    """Most that can be saved of the GPU-seconds in the time that is asked for; None where that is out of reach."""
    speed: float | None
    """Most by which the step can be faster with the saving that is asked for; None where that is out of reach."""


def reach(
    scenario: Scenario,
    lengths: Mapping[int, Sequence[int]],
    prompt_tokens: Sequence[int],
    seconds: float,
    gpu_seconds: float,
    *,
    speed: float,
    saving: float,
) -> Reach:
    """What is possible beside a step that takes `seconds` and `gpu_seconds`.

    Args:
        speed: times as fast, for which the most saving is found.
        saving: part of the GPU-seconds, for which the most speed is found.
    """

    def least(time: float) -> float:
        return least_gpu_seconds(scenario, lengths, prompt_tokens, time)

    cheapest = least(seconds / speed)
    allowed = (1 - saving) * gpu_seconds
    low, high = 0.0, 64 * seconds
    if least(high) > allowed:
        return Reach(_part(cheapest, gpu_seconds), None)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if least(middle) <= allowed else (middle, high)
    return Reach(_part(cheapest, gpu_seconds), seconds / high)


def scenario_limits(scenario: Scenario, seeds: Sequence[int], *, speed: float, saving: float) -> dict[str, Any]:
    """What anyone could reach beside static actors, over the first step of each seed's trace.

    Args:
        speed: times as fast as static actors, for which the most saving is found.
        saving: part of their GPU-seconds, for which the most speed is found.

    Returns:
        `{"scenario", "seeds", "seconds", "gpu_seconds", "speed", "saving", "most_saving", "most_speed", …}`: of static
        actors the first two; the most are means over the seeds with which it is within reach, `saving_seeds` and
        `speed_seeds` are how many these are, and None is for none.
    """
    found = []
    for seed in seeds:
        trace = generate(
            scenario.lengths,
            epochs=1,
            prompts=scenario.prompts_per_step,
            samples=scenario.samples_per_prompt,
            seed=seed,
        )
        static = run_policy(scenario, POLICIES["static"], trace, seed)[0]
        lengths = dict(enumerate(trace.response_tokens[0].tolist()))
        reached = reach(
            scenario,
            lengths,
            trace.prompt_tokens.tolist(),
            static.seconds,
            static.gpu_seconds,
            speed=speed,
            saving=saving,
        )
        found.append((static, reached))
    return {
        "scenario": scenario.name,
        "seeds": len(found),
        "seconds": fmean(static.seconds for static, _ in found),
        "gpu_seconds": fmean(static.gpu_seconds for static, _ in found),
        "speed": speed,
        "saving": saving,
        "most_saving": _mean([each.saving for _, each in found]),
        "most_speed": _mean([each.speed for _, each in found]),
        "saving_seeds": sum(each.saving is not None for _, each in found),
        "speed_seeds": sum(each.speed is not None for _, each in found),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _part(cheapest: float, gpu_seconds: float) -> float | None:
    return 1 - cheapest / gpu_seconds if math.isfinite(cheapest) else None
