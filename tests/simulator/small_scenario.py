"""A scenario that is simulated within milliseconds, and an instance of round numbers."""

import dataclasses

from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.simulator.scenarios import find_scenario
from rlhfless_operator.simulator.traces import LengthStatistics

LATENCY = LinearLatency(0.010, 0.0002, 2e-7, 0.0001)
PROFILE = InstanceProfile(LATENCY, 1, 10**9, 1.0, 2.0)
SMALL = dataclasses.replace(
    find_scenario("paper-3b-gsm8k-grpo"),
    name="small",
    gpus=4,
    prompts_per_step=12,
    samples_per_prompt=4,
    steps_per_epoch=1,
    epochs=2,
    lengths=LengthStatistics(median=100, longest=600, runaways=0.03),
)
