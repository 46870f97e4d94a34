"""What anyone could reach in a scenario: the least GPU-seconds of a step in a given time, whatever the policy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.bounds import lower_bound
from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.steps import run_policy
from rlhfless_operator.simulator.traces import generate

Floats = NDArray[np.float64]

_PRECISION = 1e-3


@dataclass(frozen=True)
class Reach:
    """The two ends of what is possible beside a step that takes some seconds and GPU-seconds."""

    saving: float | None
    """Most that can be saved of the GPU-seconds in the time that is asked for; None where nobody is so fast."""
    speed: float | None
    """Most by which the step can be faster with the saving that is asked for; None where nobody saves as much."""


def least_gpu_seconds(
    scenario: Scenario, lengths: Mapping[int, Sequence[int]], prompt_tokens: Sequence[int], seconds: float
) -> float:
    """GPU-seconds below which nobody takes the step within `seconds`; infinity where nobody is so fast.

    Generation obeys Theorem 3 of docs/planner.md. A group cannot be complete before its longest response has decoded
    alone on an instance that loaded the new weights, and what is then still to be learnt has all GPUs at most.

    Args:
        lengths: response tokens of each group, by prompt.
        prompt_tokens: by prompt.
    """
    profile = scenario.profile()
    available = seconds - scenario.update_seconds
    earliest = np.array(
        [profile.weight_load_seconds + profile.latency.step_seconds * max(group) for group in lengths.values()]
    )
    tokens = np.array([prompt_tokens[prompt] * len(group) + sum(group) for prompt, group in lengths.items()])
    work: Floats = tokens * (scenario.preparation_gpu_seconds(1.0) + scenario.learning_gpu_seconds(1.0))
    order = np.argsort(-earliest)
    # After a group is complete, its own work and that of all later ones is left.
    after = np.cumsum(work[order]) / scenario.gpus
    if available <= 0 or float((earliest[order] + after).max()) > available:
        return math.inf
    generated = available - float(after[0])
    generation = lower_bound(
        np.array([length for group in lengths.values() for length in group], dtype=np.float64),
        np.array([prompt_tokens[prompt] for prompt, group in lengths.items() for _ in group], dtype=np.float64),
        profile.latency,
        # Start-ups may be hidden from the time, but are always charged.
        generated + profile.startup_seconds,
        prefill_tokens=float(sum(prompt_tokens[prompt] for prompt in lengths)),
        start_seconds=profile.startup_seconds + profile.weight_load_seconds,
        max_batch=scenario.max_batch,
    )
    whole = float(work.sum())
    total = profile.gpus * generation + whole + scenario.trainer_start_seconds * math.ceil(whole / available)
    # A start may be hidden under the step before.
    started = scenario.gpus * (seconds + profile.startup_seconds + scenario.trainer_start_seconds)
    return total if total <= started else math.inf


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
        `{"scenario", "seconds", "gpu_seconds", "speed", "saving", "most_saving", "most_speed"}`: means over seeds, of
        static actors the first two; None where it is out of reach with some seed.
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
        "seconds": fmean(static.seconds for static, _ in found),
        "gpu_seconds": fmean(static.gpu_seconds for static, _ in found),
        "speed": speed,
        "saving": saving,
        "most_saving": _mean([each.saving for _, each in found]),
        "most_speed": _mean([each.speed for _, each in found]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _part(cheapest: float, gpu_seconds: float) -> float | None:
    return 1 - cheapest / gpu_seconds if math.isfinite(cheapest) else None
