"""The plan of a step's generation, from what the control plane knows: predicted lengths, speed, prices, limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfless_functions.api import SampleTask
from rlhfless_operator.policy.calibration import Calibration, Observation
from rlhfless_operator.policy.latency import LinearLatency
from rlhfless_operator.policy.lengths import LengthEstimate, LengthPredictor
from rlhfless_operator.policy.loads import SampleLoad
from rlhfless_operator.policy.planning import Limits, Plan, plan
from rlhfless_operator.spec import RLHFJobSpec
from rlhfless_operator.training.generated import GenerationOutcome, Stretch


@dataclass(frozen=True)
class GenerationPlan:
    """A step's plan, and what it rests on."""

    plan: Plan
    shares: list[list[SampleTask]]
    """The plan's shares in the words of the wire contract, longest expected time first."""
    estimates: Mapping[int, LengthEstimate]
    """Predicted lengths as they were when the step was planned."""
    time_price: float
    """Instance-seconds that a second of the step is worth at the job's λ."""


def observe(calibration: Calibration, outcome: GenerationOutcome, prompt_tokens: Sequence[int]) -> None:
    """Learn the instances' speed from what their actors did.

    Args:
        prompt_tokens: tokens of every prompt of the dataset, by row.
    """
    for stretch in outcome.stretches:
        if (seen := _observation(stretch, prompt_tokens)) is not None:
            calibration.observe(seen)


def _observation(stretch: Stretch, prompt_tokens: Sequence[int]) -> Observation | None:
    """What a request did, in the terms of the latency model; None if it generated nothing."""
    made = {key: max(0, tokens - stretch.begun[key]) for key, tokens in stretch.tokens.items()}
    total = sum(made.values())
    if total == 0:
        return None
    prompts = {prompt for prompt, _ in stretch.tokens}
    return Observation(
        steps=max(made.values()),
        sequence_steps=total,
        context_tokens=sum(
            count * (prompt_tokens[key[0]] + stretch.begun[key] + count / 2) for key, count in made.items()
        ),
        # What had been generated before is computed again like a prompt.
        prefill_tokens=sum(prompt_tokens[prompt] for prompt in prompts) + sum(stretch.begun.values()),
        seconds=stretch.seconds,
    )


def plan_generation(
    spec: RLHFJobSpec,
    prompts: Sequence[int],
    samples_per_prompt: int,
    prompt_tokens: Sequence[int],
    predictor: LengthPredictor,
    latency: LinearLatency,
    *,
    start_seconds: float,
) -> GenerationPlan:
    """Divide the samples of `prompts` over actors as the job's planning policy says.

    Args:
        prompt_tokens: tokens of every prompt of the dataset, by row.
        start_seconds: what an instance spends before it works.
    """
    estimates = {prompt: predictor.predict(prompt) for prompt in prompts}
    longest = float(spec.sampling.max_response_tokens)
    loads = [
        SampleLoad(prompt, index, prompt_tokens[prompt], min(longest, tokens))
        for prompt in prompts
        for index, tokens in enumerate(estimates[prompt].quantiles(samples_per_prompt))
    ]
    instances = spec.generation.instances
    limits = Limits(instances.min, instances.max, kv_tokens=spec.generation.kv_budget_tokens)
    made = plan(
        spec.planning.policy,
        loads,
        latency,
        limits,
        cost_weight=spec.planning.cost_weight,
        startup_seconds=start_seconds,
    )
    shares = sorted(made.shares, key=lambda share: -share.expected_seconds)
    tasks = [[SampleTask(prompt=sample.prompt, index=sample.index) for sample in share.samples] for share in shares]
    weight = max(spec.planning.cost_weight, 1e-3)
    price = (1 - weight) / weight * made.expected_instance_seconds / made.expected_seconds
    return GenerationPlan(made, tasks, estimates, price)
