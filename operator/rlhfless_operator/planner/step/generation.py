"""The plan of a step's generation, and of the stages that work beside it and after it.

The training loop and the simulator plan their steps with `plan_generation`. Both give it numbers: the expected
responses, the times of instances and stages, and the limits.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from rlhfless_operator.planner.acting import NO_ACTING, Acting
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.lengths import LengthEstimate
from rlhfless_operator.planner.pools.contention import ALONE, Contention
from rlhfless_operator.planner.step.async_planning import Asynchrony, on_split, split_step
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.holding import Holding
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, Plan, PolicyName, plan
from rlhfless_operator.planner.step.rates import RateSplit
from rlhfless_operator.planner.step.whole_step import StepPlan, plan_step


@dataclass(frozen=True, slots=True)
class ExpectedGroup:
    """A prompt whose responses are to be generated."""

    prompt: int
    prompt_tokens: int
    samples: int
    """Number of responses of the group."""
    estimate: LengthEstimate
    """Estimate of their lengths."""
    acting: Acting = NO_ACTING
    """Time with the environment, and given tokens, of a response of the mean length."""


@dataclass(frozen=True)
class ExpectedSamples:
    """The responses of a step with their expected lengths."""

    loads: Sequence[SampleLoad]
    runaways: Mapping[int, float]
    """Share of each prompt's responses that do not end by themselves."""
    longest: int
    """Tokens at which a response is truncated."""
    known: bool = True
    """Whether at least half of the prompts have a history."""

    @classmethod
    def of(cls, groups: Iterable[ExpectedGroup], longest: int) -> Self:
        """Expect typical lengths of each group.

        Args:
            longest: tokens at which a response is truncated.
        """
        groups = list(groups)
        loads = [
            _load(group, index, tokens)
            for group in groups
            for index, tokens in enumerate(group.estimate.group(group.samples, longest))
        ]
        known = 2 * sum(group.estimate.seen > 0 for group in groups) >= len(groups)
        return cls(loads, {group.prompt: group.estimate.runaways for group in groups}, longest, known)

    @property
    def tail_tokens(self) -> float:
        """Length of a runaway; 0 if there can be none."""
        return float(self.longest) if any(self.runaways.values()) else 0.0

    @cached_property
    def tokens(self) -> float:
        """Tokens of all samples, prompts included."""
        return math.fsum(load.prompt_tokens + load.expected_tokens for load in self.loads)


def _load(group: ExpectedGroup, index: int, tokens: float) -> SampleLoad:
    """Return a response of a group. What its environment gives is read and kept, and never decoded."""
    if group.acting is NO_ACTING:
        return SampleLoad(group.prompt, index, group.prompt_tokens, tokens)
    mean = group.estimate.mean
    acts = group.acting.times(tokens / mean) if mean > 0 else group.acting
    return SampleLoad(group.prompt, index, group.prompt_tokens + round(acts.given_tokens), tokens, acts.away_seconds)


@dataclass(frozen=True)
class StepSetting:
    """The inputs of a step's plan besides its samples."""

    instance: InstanceProfile
    """Times of a generation instance: to start, to load the weights and to decode."""
    limits: Limits
    training: Training
    """Time and cost of preparation and learning, and the numbers of their instances to choose from."""
    cost_weight: float = 0.5
    """λ of the job: 0 minimises the time of the step, 1 its cost. Only `cost` plans by it."""
    learning_seconds: float = 0.0
    """Learning's seconds in a step, by earlier steps; 0 if unknown."""
    contention: Contention = ALONE
    """Demand of other jobs for the GPUs."""
    asynchrony: Asynchrony | None = None
    """The way in which an asynchronous job generates ahead of its learner; None in a synchronous one."""
    holding: Holding | None = None
    """Costs of keeping an instance and the learner on the same GPUs; None if that is not possible."""

    @property
    def effective_cost_weight(self) -> float:
        """λ, adjusted for the demand of other jobs."""
        return self.contention.cost_weight(self.cost_weight)


@dataclass(frozen=True)
class GroupForecast:
    """The groups that a learner can expect."""

    ready: Mapping[int, float]
    """Seconds into the step at which each prompt's group is expected to be prepared."""
    learning: Mapping[int, float]
    """Seconds that learning from each prompt's group takes."""
    time_price: float
    """Instance-seconds of the learner that a second of the step is worth."""


@dataclass(frozen=True)
class PlannedStep:
    """A step's plan with its forecast."""

    generation: Plan
    expected_generation_seconds: float
    """Seconds of generation on instances that are ready."""
    expected_seconds: float
    """Seconds to the new weights."""
    time_price: float
    """GPU-seconds of generation that a second of the step is worth at its λ."""
    preparers: int
    """Most instances that prepare its groups at a time."""
    preparers_reason: str = ""
    """Reason for this number; empty if the plan had no choice."""
    learners: int | None = None
    """Number of learning instances that the plan chose; None if it had no choice."""
    groups: GroupForecast | None = None
    """Groups that a learner behind preparation can expect; None for a learner that waits for the whole batch."""
    whole: StepPlan | None = None
    """Plan of the whole step; None by policies that plan generation alone."""
    holds: bool = False
    """Whether the instances of all stages stay for the whole step."""
    holds_reason: str = ""
    """Reason for that; empty if the plan had no choice."""
    split: RateSplit | None = None
    """Split of the instances by the rates of the stages; only `cost` makes one, in an asynchronous job."""


def plan_generation(policy: PolicyName, samples: ExpectedSamples, setting: StepSetting) -> PlannedStep:
    """Divide a step's samples over instances.

    The `cost` policy plans the whole step: generation, the preparation that goes on beside it, and learning after it.
    """
    if policy == "cost":
        return _plan_whole(samples, setting)
    instance = setting.instance
    made = plan(
        policy,
        samples.loads,
        instance.latency,
        setting.limits,
        startup_seconds=instance.startup_seconds,
        weight_load_seconds=instance.weight_load_seconds,
    )
    weight = max(setting.effective_cost_weight, 1e-3)
    return PlannedStep(
        made,
        made.expected_seconds - instance.startup_seconds,
        made.expected_seconds + setting.learning_seconds,
        (1 - weight) / weight * made.expected_instance_seconds / made.expected_seconds,
        preparers=max(setting.training.preparers, default=0),
    )


def _plan_whole(samples: ExpectedSamples, setting: StepSetting) -> PlannedStep:
    """Plan by the `cost` policy."""
    instance, training = setting.instance, setting.training
    cost_weight = setting.effective_cost_weight
    limits = setting.limits.at_most(setting.contention.actors)

    split = split_samples(samples, setting) if setting.asynchrony is not None else None
    if split is not None:
        limits, training = on_split(split, limits, training, len(samples.runaways))
    step = plan_step(
        samples.loads,
        instance,
        limits,
        training,
        cost_weight=cost_weight,
        # Instances that are not warm yet are awaited, but most are warm. All of them load the new weights.
        ready_seconds=instance.weight_load_seconds,
        tail_tokens=samples.tail_tokens,
        runaways=samples.runaways,
        holding=setting.holding,
        known=samples.known,
    )
    if split is not None:
        reason = split.preparers.reason
    else:
        reason = (
            f"preparation takes {training.token_gpu_seconds * samples.tokens:.3g} instance-seconds a step, and the step"
            f" {step.expected_seconds:.3g} s with {step.preparers} (λ {cost_weight:g})"
        )
    return PlannedStep(
        step.generation,
        step.generation.expected_seconds - instance.startup_seconds,
        step.expected_seconds,
        step.time_price,
        step.preparers,
        reason if len(setting.training.preparers) > 1 else "",
        step.trainer.gpus if training.learners else None,
        _groups(samples, training, step),
        step,
        step.holds,
        _holds_reason(step, cost_weight) if training.holding is not None else "",
        split,
    )


def split_samples(samples: ExpectedSamples, setting: StepSetting) -> RateSplit:
    """Split the instances of an asynchronous job by the rates of its stages."""
    assert setting.asynchrony is not None, "a synchronous job has no split"
    return split_step(
        samples.loads,
        setting.instance,
        setting.limits.at_most(setting.contention.actors),
        setting.training,
        setting.asynchrony,
        learning_seconds=setting.learning_seconds,
        cost_weight=setting.effective_cost_weight,
        runaways=samples.runaways,
        tail_tokens=samples.tail_tokens,
    )


def _holds_reason(step: StepPlan, cost_weight: float) -> str:
    """Say why a step's instances stay or go."""
    if step.otherwise is None:
        return ""
    mine, other = (step.expected_seconds, step.expected_gpu_seconds), step.otherwise
    (stay, stays), (go, goes) = (mine, other) if step.holds else (other, mine)
    return (
        f"to keep all of them takes {stay:.4g} s and {stays:.4g} GPU-seconds of generation, to let them go and start"
        f" again {go:.4g} s and {goes:.4g} (λ {cost_weight:g})"
    )


def _groups(samples: ExpectedSamples, training: Training, step: StepPlan) -> GroupForecast | None:
    """Forecast the groups for a learner under the tail of generation; None if it can't begin there."""
    token_seconds, learners = training.accumulation_token_seconds, training.learning_instances
    if not token_seconds:
        return None
    if training.learners:
        chosen = next(each for each in training.learners if each.instances == step.trainer.gpus)
        token_seconds, learners = chosen.token_seconds, chosen.instances
    if not token_seconds:
        return None
    learning = dict.fromkeys(samples.runaways, 0.0)
    for load in samples.loads:
        learning[load.prompt] += token_seconds * (load.prompt_tokens + load.expected_tokens)
    price = step.time_price / max(training.learning_price * learners, 1e-6)
    return GroupForecast(step.expected_groups, learning, price)
