"""The least GPU-seconds of a step: no policy needs fewer, and less time needs more of them."""

import dataclasses
import math

import pytest

from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.step_bound import least_gpu_seconds
from rlhfless_operator.simulator.steps import run_policy
from rlhfless_operator.simulator.traces import generate
from tests.simulator.small_scenario import SMALL


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_policy_does_better_than_anyone_could(seed: int) -> None:
    trace = generate(SMALL.lengths, epochs=1, prompts=12, samples=4, seed=seed)
    lengths = dict(enumerate(trace.response_tokens[0].tolist()))
    for weight in (0.05, 0.5, 0.95):
        for settings in POLICIES.values():
            scenario = dataclasses.replace(SMALL, cost_weight=weight)
            step = run_policy(scenario, settings, trace, seed)[0]
            prompts = trace.prompt_tokens.tolist()
            least = least_gpu_seconds(scenario, lengths, prompts, step.seconds, starts=settings.starts)
            assert least <= step.gpu_seconds * (1 + 1e-9), settings.name


def test_less_time_needs_more_gpu_seconds() -> None:
    trace = generate(SMALL.lengths, epochs=1, prompts=12, samples=4, seed=0)
    lengths, prompts = dict(enumerate(trace.response_tokens[0].tolist())), trace.prompt_tokens.tolist()
    assert math.isinf(least_gpu_seconds(SMALL, lengths, prompts, 3.0)), "weights alone take that long"
    costs = [least_gpu_seconds(SMALL, lengths, prompts, seconds) for seconds in (11.0, 12.0, 15.0, 30.0)]
    assert costs == sorted(costs, reverse=True) and math.isfinite(costs[-1])
