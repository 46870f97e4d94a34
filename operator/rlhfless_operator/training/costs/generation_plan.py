"""The plan of a step's generation, from what the control plane knows: predicted lengths, speed, prices, limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhfless_functions.api import EngineRoom, SampleTask, Stage
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.calibration import Calibration, Observation
from rlhfless_operator.planner.latency.linear import InstanceProfile, Latency
from rlhfless_operator.planner.lengths import LengthEstimate, LengthPredictor
from rlhfless_operator.planner.pools.contention import ALONE, Contention
from rlhfless_operator.planner.step.async_planning import plan_asynchronous_step
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.learner_scaling import LearnerOption, sizes
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, Plan, plan
from rlhfless_operator.planner.step.whole_step import StepPlan, plan_step
from rlhfless_operator.training.actors.generated import GenerationOutcome, Stretch

WEIGHTS = "weights"
"""Under which name the history has how long engines take until they have a step's weights."""


@dataclass(frozen=True)
class GroupForecast:
    """What there is to learn from, and when."""

    ready: Mapping[int, float]
    """By prompt, seconds into the step when its group is expected to be prepared."""
    learning: Mapping[int, float]
    """By prompt, seconds that learning from its group takes."""
    time_price: float
    """Instance-seconds of the learner that a second of the step is worth."""


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
    expected_generation_seconds: float
    """On instances that are ready."""
    expected_step_seconds: float
    """To the new weights."""
    groups: GroupForecast | None = None
    """What a learner that follows preparation can expect; None for one that waits for the whole batch."""
    wanted_by_others: float = 0.0
    """The share of the pool's GPU time that other jobs wanted when the step was planned."""
    learners: int | None = None
    """Learning instances that the plan chose, where it had a choice."""
    preparers: int = 1
    """Most instances that prepare its groups at a time."""
    preparers_reason: str = ""
    """Why so many, where the plan had a choice."""


def observe(calibration: Calibration, outcome: GenerationOutcome, prompt_tokens: Sequence[int]) -> None:
    """Learn the instances' speed from what their actors did.

    Args:
        prompt_tokens: tokens of every prompt of the dataset, by row.
    """
    batch = outcome.room.sequences if outcome.room is not None else None
    seen = [_observation(stretch, prompt_tokens, batch) for stretch in outcome.stretches]
    calibration.observe(*(each for each in seen if each is not None))


def _observation(stretch: Stretch, prompt_tokens: Sequence[int], batch: int | None) -> Observation | None:
    """What a request did, in the terms of the latency model; None if it generated nothing.

    An engine that counts its passes says how many there were, and how many drafted rows. Of others it is taken that
    every pass gave each sequence a token. Tokens whose keys and values were kept from the request before count as
    nothing.
    """
    made = {key: max(0, tokens - stretch.begun[key]) for key, tokens in stretch.tokens.items()}
    total = sum(made.values())
    if total == 0:
        return None
    prompts = {prompt for prompt, _ in stretch.tokens}
    prompt_total = sum(prompt_tokens[prompt] for prompt in prompts)
    contexts = sum(count * (prompt_tokens[key[0]] + stretch.begun[key] + count / 2) for key, count in made.items())
    counts = stretch.decoding
    # Where some had to wait there were more steps than the longest response has tokens.
    steps, sequence_steps = max(max(made.values()), total / batch if batch else 0), float(total)
    if counts.passes and counts.tokens:
        steps, sequence_steps = counts.passes, total * counts.sequence_passes / counts.tokens
    return Observation(
        steps=steps,
        sequence_steps=sequence_steps,
        context_tokens=contexts * sequence_steps / total,
        # What had been generated before is computed again like a prompt.
        prefill_tokens=max(
            0.0, max(0.0, prompt_total - stretch.fetched_tokens) + sum(stretch.begun.values()) - counts.kept_tokens
        ),
        # It may have begun to wait before it was first heard of.
        seconds=max(stretch.seconds - stretch.waited_seconds, 0.1 * stretch.seconds),
        drafted_rows=counts.drafted,
    )


def _price_ratio(spec: RLHFJobSpec, stage: Stage) -> float:
    """What an instance of a stage costs, in instances of generation; 1 where generation costs nothing."""
    prices = spec.instance_prices
    return float(prices[stage] / prices["generation"]) if prices["generation"] else 1.0


def _idle_seconds(history: History, stage: Stage) -> float:
    """In which an instance of a stage is held in a step without working: kept until the next, or started anew."""
    switch = history.mean(f"draining/{stage}") + history.mean(f"startup/{stage}")
    return min(switch, history.mean(f"gap/{stage}", switch))


def plan_generation(
    spec: RLHFJobSpec,
    actors: ActorRange,
    prompts: Sequence[int],
    samples_per_prompt: int,
    prompt_tokens: Sequence[int],
    predictor: LengthPredictor,
    latency: Latency,
    history: History,
    *,
    follows: bool = False,
    contention: Contention = ALONE,
    room: EngineRoom | None = None,
    learners: Sequence[LearnerOption] = (),
) -> GenerationPlan:
    """Divide the samples of `prompts` over actors as the job's planning policy says.

    The `cost` policy plans the whole step: generation, the preparation that goes on beside it, and learning after it.

    Args:
        actors: how many there may be.
        prompt_tokens: tokens of every prompt of the dataset, by row.
        history: what the stages have taken so far.
        follows: whether learning may begin before the batch is complete.
        contention: what other jobs leave of the GPUs.
        room: what the instances have said to have room for; without it, only `generation.kvBudgetTokens` is known.
        learners: numbers of learning instances from which the `cost` policy chooses; one of them if left out.
    """
    estimates = {prompt: predictor.predict(prompt) for prompt in prompts}
    longest = spec.sampling.max_response_tokens
    loads = [
        SampleLoad(prompt, index, prompt_tokens[prompt], tokens)
        for prompt in prompts
        for index, tokens in enumerate(estimates[prompt].group(samples_per_prompt, longest))
    ]
    kv_tokens, max_batch = spec.generation.kv_budget_tokens, None
    if room is not None:
        kv_tokens, max_batch = min(room.kv_tokens, kv_tokens or room.kv_tokens), room.sequences
    limits = Limits(actors.least, actors.most, kv_tokens, max_batch)
    start_seconds, loading_seconds = history.mean("startup/generation"), history.mean(WEIGHTS)
    groups, together = None, None
    preparation = spec.preparation.instances
    preparers, why = preparation.max, ""
    cost_weight = contention.cost_weight(spec.planning.cost_weight)
    accumulation = history.mean("learning/token") if follows else 0.0
    surprise = sum(estimate.runaways for estimate in estimates.values()) > 0
    if spec.planning.policy == "cost":
        can_work = actors if contention.actors is None else actors.at_most(contention.actors)
        limits = replace(limits, max_instances=can_work.most)
        profile = InstanceProfile(latency, 1, limits.kv_tokens or 2**53, start_seconds, loading_seconds)
        training = Training(
            gpus=1,
            token_gpu_seconds=history.mean("preparation/token"),
            start_seconds=0.0,
            update_seconds=0.0,
            preparation_price=_price_ratio(spec, "preparation"),
            learning_price=_price_ratio(spec, "learning"),
            preparers=tuple(sizes(preparation.min, preparation.max)),
            preparer_idle_seconds=_idle_seconds(history, "preparation"),
            afterwards_seconds=history.mean("learning/rest" if accumulation else "learning"),
            accumulation_token_seconds=accumulation,
            learners=tuple(learners),
            follows=accumulation > 0,
        )

        def plan_with(training: Training) -> StepPlan:
            return plan_step(
                loads,
                profile,
                limits,
                training,
                cost_weight=cost_weight,
                # Instances are awaited where they are not warm yet, but most are. All of them load the new weights.
                ready_seconds=loading_seconds,
                tail_tokens=longest if surprise else 0.0,
                runaways={prompt: estimate.runaways for prompt, estimate in estimates.items()},
            )

        tokens = math.fsum(load.prompt_tokens + load.expected_tokens for load in loads)
        if spec.asynchronous is not None:
            ahead = plan_asynchronous_step(
                plan_with,
                training,
                tokens=tokens,
                startup_seconds=start_seconds,
                learning_seconds=history.mean("learning"),
                max_staleness=spec.asynchronous.max_staleness,
            )
            step, why = ahead.step, ahead.preparers.reason
        else:
            step = plan_with(training)
            why = (
                f"preparation takes {training.token_gpu_seconds * tokens:.3g} instance-seconds a step, and the step"
                f" {step.expected_seconds:.3g} s with {step.preparers} (λ {cost_weight:g})"
            )
        preparers = step.preparers
        made, seconds, price = step.generation, step.expected_seconds, step.time_price
        if learners:
            chosen = next(each for each in learners if each.instances == step.trainer.gpus)
            accumulation = chosen.token_seconds if accumulation else 0.0
            together = chosen.instances
        if accumulation:
            learning = dict.fromkeys(prompts, 0.0)
            for load in loads:
                learning[load.prompt] += accumulation * (load.prompt_tokens + load.expected_tokens)
            of_learner = price / max(_price_ratio(spec, "learning") * (together or 1), 1e-6)
            groups = GroupForecast(step.expected_groups, learning, of_learner)
    else:
        made = plan(
            spec.planning.policy,
            loads,
            latency,
            limits,
            startup_seconds=start_seconds,
            weight_load_seconds=loading_seconds,
        )
        seconds = made.expected_seconds + history.mean("learning")
        weight = max(cost_weight, 1e-3)
        price = (1 - weight) / weight * made.expected_instance_seconds / made.expected_seconds
    shares = sorted(made.shares, key=lambda share: -share.expected_seconds)
    tasks = [[SampleTask(prompt=sample.prompt, index=sample.index) for sample in share.samples] for share in shares]
    generation_seconds = made.expected_seconds - start_seconds
    return GenerationPlan(
        made,
        tasks,
        estimates,
        price,
        generation_seconds,
        seconds,
        groups,
        contention.wanted,
        together,
        preparers,
        why if spec.chooses_preparers else "",
    )
