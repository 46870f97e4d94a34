"""The live migration of a step: the policy's state machine under the rule that the job names."""

import math
from collections.abc import Callable

from rlhfless_functions.api import EngineRoom
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.planner.latency.linear import Latency
from rlhfless_operator.planner.moves.migration import MOST_GROWTH, Key, Migration, Rule
from rlhfless_operator.planner.moves.rules import ActorRatio, Repack, Saving, WaitingLearner
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.planner.step.chunks import before_last_chunk
from rlhfless_operator.planner.step.generation import PlannedStep
from rlhfless_operator.training.costs.generation_plan import GenerationPlan

UNKNOWN_PAUSE_SECONDS = 0.25
"""Seconds in which samples wait while they are moved, besides prefill, until that is measured."""


def open_migration(
    spec: RLHFJobSpec,
    plan: GenerationPlan,
    latency: Latency,
    *,
    pause_seconds: float,
    room: EngineRoom | None = None,
    learner: WaitingLearner | None = None,
) -> Migration:
    """Open the state machine of one step's generation.

    Args:
        plan: the plan to carry out; its estimates predict the rest of each response.
        latency: of the instances, as far as it is known.
        pause_seconds: measured cost of a move so far, besides prefill.
        room: as the instances have reported it; no receiver is given more at a time.
        learner: the learner of the step, if it needs GPUs that actors leave.
    """
    rule = _rule(spec, plan, latency, pause_seconds, room, learner)
    return Migration(rule, _outlook(spec, plan), max_moves=spec.planning.migration.moves_per_sample)


def waiting_learner(planned: PlannedStep, shared: SharedGpus | None, start_seconds: float) -> WaitingLearner | None:
    """Return the learner of a plan that needs GPUs which actors leave; None if it has its own, or waits for all groups.

    Args:
        shared: GPUs on which the stages take turns; None if they can all have theirs at once.
        start_seconds: seconds in which the learner wakes or starts.
    """
    if shared is None or planned.groups is None or planned.whole is None:
        return None
    trainer, learning = planned.whole.trainer, sum(planned.groups.learning.values())
    actors = shared.actors_beside({"preparation": planned.preparers, "learning": trainer.gpus})
    return WaitingLearner(actors, start_seconds + before_last_chunk(learning), trainer.begin)


def _rule(
    spec: RLHFJobSpec,
    plan: GenerationPlan,
    latency: Latency,
    pause_seconds: float,
    room: EngineRoom | None,
    learner: WaitingLearner | None,
) -> Rule | None:
    settings = spec.planning.migration
    largest = max(map(len, plan.shares), default=1)
    kv_tokens, slots = spec.generation.kv_budget_tokens or math.inf, min(settings.slots, MOST_GROWTH * largest)
    if room is not None:
        kv_tokens, slots = min(kv_tokens, room.kv_tokens), min(slots, room.sequences)
    if settings.policy == "threshold":
        return ActorRatio(settings.ratio, slots)
    if settings.policy == "repack":
        return Repack(slots, kv_tokens, settings.period)
    if settings.policy == "benefit":
        return Saving(
            latency,
            slots,
            kv_tokens,
            longest=spec.sampling.max_response_tokens,
            time_price=plan.planned.time_price,
            pause_seconds=pause_seconds,
            hysteresis=settings.hysteresis,
            period=settings.period,
            learner=learner,
        )
    return None


def _outlook(spec: RLHFJobSpec, plan: GenerationPlan) -> Callable[[Key, int], tuple[float, float]]:
    longest = spec.sampling.max_response_tokens
    estimates = plan.estimates

    def outlook(key: Key, tokens: int) -> tuple[float, float]:
        return estimates[key[0]].outlook(tokens, longest)

    return outlook
