"""The time of a plan: seconds of one core by samples and actors.

    python benchmarks/planning/planner.py [--json]

Each row plans a step in full, from sample objects to shares: the median processor time of several plans. Lengths are
lognormal by prompt with noise in the group and a few per cent at the cap. Each sample of a group has its own expected
length, which is the hardest case. The last rows plan a whole step (`plan_step`), as the simulator and live jobs do,
with and without a limit on the batch. They show the minimum of several runs, because other work on a machine only adds
time.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace

import numpy as np

from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.learner_scaling import LearnerOption
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, plan
from rlhfless_operator.planner.step.whole_step import plan_step

# Llama-2-70B on eight H100: 10.1 ms for a decode step and what 256 sequences add at 512 and 2,048 tokens of context.
LATENCY = LinearLatency(
    step_seconds=10.1e-3, sequence_seconds=25e-6, context_seconds=13e-9, prefill_token_seconds=20e-6
)
SIZES = ((1_000, 16), (3_000, 32), (10_000, 128), (30_000, 256), (100_000, 512), (100_000, 1_024))


def workload(samples: int, per_prompt: int, seed: int = 0) -> list[SampleLoad]:
    """A step of `samples` samples with the published statistics of lengths."""
    random = np.random.default_rng(seed)
    prompts = samples // per_prompt
    means = random.lognormal(6.0, 0.8, prompts)
    lengths = np.minimum(32_768, means[:, None] * random.lognormal(0, 0.3, (prompts, per_prompt)))
    lengths[random.random((prompts, per_prompt)) < 0.02] = 32_768
    return [
        SampleLoad(prompt, index, 200, float(lengths[prompt, index]))
        for prompt in range(prompts)
        for index in range(per_prompt)
    ]


def measure(samples: int, actors: int, repeats: int) -> dict[str, float | int]:
    """The median time of a plan on at most `actors` actors, the weight of time being so high that it wants many."""
    loads = workload(samples, per_prompt=8)
    limits = Limits(max_instances=actors)
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        result = plan("cost", loads, LATENCY, limits, cost_weight=0.0)
        seconds.append(time.process_time() - begin)
    return {"samples": samples, "actors": len(result.shares), "most": actors, "seconds": statistics.median(seconds)}


_LIVE = Training(1, 1e-5, 0.0, 0.0, preparers=(1,), afterwards_seconds=5.0, accumulation_token_seconds=2e-5)
LEARNERS = tuple(LearnerOption(count, 1e-5 + 6e-5 / count, 5.0, 3.0) for count in (1, 2, 4, 8))
TRAINING = {
    "simulated": Training(16, 4e-5, 3.0, 0.5),
    "live": _LIVE,
    "live, 4 numbers of learners": replace(_LIVE, learners=LEARNERS, follows=True),
}
"""How a step is trained on: on the GPUs that instances leave, by a learner of its own, or by as many as are planned."""


def measure_step(kind: str, max_batch: int | None, repeats: int) -> dict[str, float | int | str | None]:
    """The least time of a whole step's plan, of 2,048 samples on at most 16 actors with possible runaways."""
    loads = workload(2048, per_prompt=8)
    instance = InstanceProfile(LATENCY, 1, 10**6, 2.0, 3.0)
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        plan_step(
            loads,
            instance,
            Limits(1, 16, 10**6, max_batch),
            TRAINING[kind],
            cost_weight=0.5,
            ready_seconds=3.0,
            tail_tokens=32_768.0,
            runaways=dict.fromkeys(range(256), 0.02),
        )
        seconds.append(time.process_time() - begin)
    return {"step": kind, "samples": 2048, "most": 16, "max_batch": max_batch, "seconds": min(seconds)}


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description="How fast the planner is.")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--repeats", type=int, default=5, help="plans per row")
    arguments = parser.parse_args()
    rows = [measure(samples, actors, arguments.repeats) for samples, actors in SIZES]
    steps = [measure_step(kind, batch, arguments.repeats) for kind in TRAINING for batch in (None, 256)]
    if arguments.json:
        print(json.dumps([*rows, *steps], indent=2))
        return
    print(f"{'samples':>9} {'actors':>7} {'ms':>8}")
    for row in rows:
        print(f"{row['samples']:>9,} {row['actors']:>7,} {1000 * row['seconds']:>8.1f}")
    for step in steps:
        print(f"plan_step, {step['step']}, batch of {step['max_batch'] or 'any size'}: {1000 * step['seconds']:.1f} ms")


if __name__ == "__main__":
    main()
