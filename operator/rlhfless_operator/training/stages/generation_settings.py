"""Settings of a rollout with actors of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from rlhfless_functions.api import GenerationRequest, Purpose, WeightsReference
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.costs.prefix_sharing import PrefixSharing
from rlhfless_operator.training.instances.away import Away
from rlhfless_operator.training.instances.weights_traffic import ReadsOfVersion
from rlhfless_operator.training.run import TrainingRun


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a stage, besides its work."""

    sink_root: str
    """Folder of the step's sinks."""
    driver: int
    """Number of this driver; no two drivers write the same sink."""
    retries: int
    """Losses in a row, without a sample finished in between, that an actor survives."""
    prompt_tokens: Callable[[int], int]
    """Tokens of a prompt."""
    make_request: Callable[[ActorAttempt], GenerationRequest]
    """The request of an actor's attempt."""
    weights: WeightsReference
    """Weights that requests sample with."""
    slots: int = 1
    """Most samples that moves gather on one actor; 1 if there are no moves."""
    longest_prompt: int = 0
    """Tokens of the longest prompt that may arrive."""
    away: Away | None = None
    """Lets actors go while environments work; None if they are kept."""
    look_seconds: float = 0.25
    """Least seconds between two questions to the migration."""


def settings_of(
    run: TrainingRun,
    step: int,
    purpose: Purpose,
    weights: WeightsReference,
    plan: GenerationPlan,
    reads: ReadsOfVersion,
    sharing: PrefixSharing | None,
    away: Away | None,
) -> GenerationSettings:
    """Return the settings of a rollout.

    Args:
        weights: that sample it.
        reads: hears which request asks for which weights.
    """
    tokens, moves = run.prompts.tokens(purpose), run.spec.planning.migration
    draft_steps = run.draft_history.steps_for
    may_move = moves.policy != "none" and len(plan.shares) > 1
    replaces = purpose == "training" and bool(run.requests.algorithm.dynamic_sampling_rounds)

    def make_request(attempt: ActorAttempt) -> GenerationRequest:
        reads.asks(attempt.actor, attempt.weights.version)
        return run.requests.generate(
            step,
            purpose,
            None,
            sharing,
            draft_steps,
            attempt,
            weights_from=run.relays.chain(attempt.weights.version),
        )

    return GenerationSettings(
        sink_root=run.folder.rollouts(step, purpose),
        driver=run.lease.number,
        retries=run.spec.limits.retries,
        prompt_tokens=tokens.__getitem__,
        make_request=make_request,
        weights=weights,
        slots=moves.slots if may_move else 1,
        longest_prompt=max(tokens) if replaces else 0,
        away=away,
    )
