"""The plan of a step of an asynchronous job. Its stages work at the same time, so the plan matches their rates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhfless_operator.planner.groups.group_buffer import PIECES
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits
from rlhfless_operator.planner.step.rates import Actors, Learner, Preparers, RateSplit, StepWork, split_by_rates

PUBLISHING = "publishing"
"""The history's name for the seconds until a step's weights are there, in which the learner takes the next step."""


@dataclass(frozen=True)
class Asynchrony:
    """The way in which an asynchronous job generates ahead of its learner."""

    max_staleness: int
    """Number of versions that a step's weights may be behind."""
    renewal_seconds: float = 0.0
    """Seconds for which an actor stands still for a step's weights."""
    recomputes: bool = False
    """Whether the contexts of its batch are then computed anew."""
    actors: int | None = None
    """Number of actors at the moment; None before the first plan."""
    lag_seconds: float | None = None
    """Time from a step's last groups until it is learnt; None if the learner begins with all groups."""
    publishing_seconds: float = 0.0
    """Time from then until its weights are there, if the learner takes the next step meanwhile."""


def lag_of_pieces(learning: float, training: float) -> float:
    """Return the seconds from a step's last groups until it is learnt, if its learner begins with the first.

    Args:
        learning: seconds for which a step occupies the learner.
        training: those among them that it takes for its groups.
    """
    return learning - training * (1 - 1 / PIECES)


def split_step(
    loads: Sequence[SampleLoad],
    instance: InstanceProfile,
    limits: Limits,
    training: Training,
    asynchrony: Asynchrony,
    *,
    learning_seconds: float,
    cost_weight: float,
    runaways: Mapping[int, float] | None = None,
    tail_tokens: float = 0.0,
) -> RateSplit:
    """Split the instances by the rates of the stages.

    Args:
        loads: samples of a step.
        training: costs of the other stages; its `preparers` are the allowed numbers, rising.
        learning_seconds: seconds for which earlier steps occupied the learner; 0 if unknown.
        runaways: share of each prompt's responses that are runaways.
        tail_tokens: length of a runaway; 0 if there can be none.
    """
    tokens = math.fsum(load.prompt_tokens + load.expected_tokens for load in loads)
    work, least, most = training.token_gpu_seconds * tokens, training.preparers[0], training.preparers[-1]
    return split_by_rates(
        StepWork.of(loads, runaways, tail_tokens),
        Actors(
            instance.latency,
            limits.min_instances,
            limits.max_instances,
            limits.max_batch,
            limits.kv_tokens,
            asynchrony.renewal_seconds,
            asynchrony.recomputes,
        ),
        Learner(
            training.learning_instances,
            learning_seconds,
            training.learning_price,
            asynchrony.lag_seconds,
            asynchrony.publishing_seconds,
        ),
        Preparers(work, least, most, training.preparation_price),
        steps_ahead=asynchrony.max_staleness,
        cost_weight=cost_weight,
        now=asynchrony.actors,
    )


def on_split(split: RateSplit, limits: Limits, training: Training, prompts: int) -> tuple[Limits, Training]:
    """Return limits and costs with which a step is planned on the actors and preparers of a split.

    Args:
        prompts: of the step. A plan has no more shares.
    """
    actors = min(split.actors, prompts)
    own = replace(limits, min_instances=actors, max_instances=actors)
    return own, replace(training, preparers=(split.preparers.instances,))
