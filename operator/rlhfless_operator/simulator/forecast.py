"""Before money is spent: what a step's generation will take and cost at several weights of cost against time."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from rlhfless_operator.policy.latency import InstanceProfile
from rlhfless_operator.policy.loads import SampleLoad
from rlhfless_operator.policy.planning import Limits, Plan, Planner
from rlhfless_operator.simulator.traces import LengthStatistics, generate

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def forecast(
    instance: InstanceProfile,
    lengths: LengthStatistics,
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    limits: Limits,
    instance_hour: Decimal,
    weights: Sequence[float] = WEIGHTS,
    seed: int = 0,
) -> dict[str, Any]:
    """Generation of a typical step, planned at each weight, and the front between time and cost.

    Args:
        lengths: what is expected of the responses.
        instance_hour: price of an instance for an hour.

    Returns:
        `{"plans": [{"cost_weight", "actors", "seconds", "instance_seconds", "lower_bound_instance_seconds", "cost"}],
        "front": [the same without "cost_weight"]}`; money is a decimal string.
    """
    trace = generate(lengths, epochs=1, prompts=prompts_per_step, samples=samples_per_prompt, seed=seed)
    samples = [
        SampleLoad(
            int(prompt), int(index), int(trace.prompt_tokens[prompt]), float(trace.response_tokens[0, prompt, index])
        )
        for prompt, index in np.ndindex(prompts_per_step, samples_per_prompt)
    ]
    planner = Planner(samples, instance.latency, limits, instance.startup_seconds + instance.weight_load_seconds)

    def row(plan: Plan) -> dict[str, Any]:
        hours = Decimal(repr(plan.expected_instance_seconds)) / 3600
        return {
            "actors": len(plan.shares),
            "seconds": plan.expected_seconds,
            "instance_seconds": plan.expected_instance_seconds,
            "lower_bound_instance_seconds": plan.lower_bound_instance_seconds,
            "cost": str((hours * instance_hour).quantize(Decimal("0.0001"))),
        }

    return {
        "plans": [{"cost_weight": weight, **row(planner.weighted(weight))} for weight in weights],
        "front": [row(plan) for plan in planner.front()],
    }
