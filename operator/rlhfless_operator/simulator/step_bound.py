"""The least that any policy could need for a whole step in a given time."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.step.bounds import alone_seconds, lower_bound
from rlhfless_operator.simulator.scenarios import Scenario

Floats = NDArray[np.float64]


def least_gpu_seconds(
    scenario: Scenario,
    lengths: Mapping[int, Sequence[int]],
    prompt_tokens: Sequence[int],
    seconds: float,
    *,
    starts: bool = True,
    drafts: bool = True,
) -> float:
    """Return the least GPU-seconds with which any policy takes the step within `seconds`; infinity if none is so fast.

    Generation obeys Theorem 3 of docs/research/planner.md. A group can't be complete before its longest response has
    decoded alone, on an instance that loaded the new weights. The learning left then has at most all GPUs.

    Args:
        lengths: response tokens of each group, by prompt.
        prompt_tokens: by prompt.
        starts: whether instances and the learner's GPUs must be started.
        drafts: whether the scenario's drafts are used.
    """
    profile = scenario.profile(drafts=drafts)
    startup, trainer_start = (profile.startup_seconds, scenario.trainer_start_seconds) if starts else (0.0, 0.0)
    loading = profile.weight_load_seconds
    available = seconds - scenario.update_seconds
    longest = np.array([max(group) for group in lengths.values()], dtype=np.float64)
    prompts = np.array([prompt_tokens[prompt] for prompt in lengths], dtype=np.float64)
    earliest = loading + alone_seconds(longest, prompts, profile.latency)
    tokens = np.array([prompt_tokens[prompt] * len(group) + sum(group) for prompt, group in lengths.items()])
    work: Floats = tokens * (scenario.preparation_gpu_seconds(1.0) + scenario.learning_gpu_seconds(1.0))
    order = np.argsort(-earliest)
    # After a group is complete, its own work and that of all later ones is left.
    after = np.cumsum(work[order]) / scenario.gpus
    if available <= 0 or float((earliest[order] + after).max()) > available:
        return math.inf
    # The group that is complete last has its own work before it.
    generated = available - float(work.min()) / scenario.gpus
    generation = lower_bound(
        np.array([length for group in lengths.values() for length in group], dtype=np.float64),
        np.array([prompt_tokens[prompt] for prompt, group in lengths.items() for _ in group], dtype=np.float64),
        profile.latency,
        # Start-ups may be hidden from the time, but are always charged.
        generated + startup,
        prefill_tokens=float(sum(prompt_tokens[prompt] for prompt in lengths)),
        start_seconds=startup + loading,
        max_batch=scenario.max_batch,
    )
    whole = float(work.sum())
    total = profile.gpus * generation + whole + trainer_start * math.ceil(whole / available)
    # A start may be hidden under the step before.
    started = scenario.gpus * (seconds + startup + trainer_start)
    return total if total <= started else math.inf
