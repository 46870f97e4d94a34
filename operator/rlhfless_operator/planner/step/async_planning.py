"""The plan of a step of an asynchronous job. Its stages work at the same time, so the plan matches their rates."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.least_period import least_period
from rlhfless_operator.planner.step.preparers import PreparerChoice, matching_preparers
from rlhfless_operator.planner.step.whole_step import StepPlan


@dataclass(frozen=True)
class AsynchronousPlan:
    """A step whose stages work beside those of other steps."""

    step: StepPlan
    preparers: PreparerChoice


def plan_asynchronous_step(
    plan_with: Callable[[Training], StepPlan],
    training: Training,
    *,
    tokens: float,
    startup_seconds: float,
    learning_seconds: float,
    max_staleness: int,
) -> AsynchronousPlan:
    """Plan a step, and choose how many instances prepare its groups.

    Args:
        plan_with: plans its generation with one number of preparers.
        training: costs of the other stages; its `preparers` are the allowed numbers, rising.
        tokens: expected tokens of the step, prompts included.
        startup_seconds: charged to each share of a plan. In the long run instances are kept.
        learning_seconds: learning time of earlier steps; 0 if unknown.
        max_staleness: number of versions that a step's weights may be behind.
    """
    least, most = training.preparers[0], training.preparers[-1]
    step = plan_with(replace(training, preparers=(most,)))
    shares = [share.expected_seconds - startup_seconds for share in step.generation.shares]
    choice = matching_preparers(
        training.token_gpu_seconds * tokens,
        generation=least_period(shares, learning_seconds, max_staleness),
        learning=learning_seconds,
        least=least,
        most=most,
    )
    if choice.instances != most:
        step = plan_with(replace(training, preparers=(choice.instances,)))
    return AsynchronousPlan(step, choice)
