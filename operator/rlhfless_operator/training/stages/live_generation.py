"""The generation of a rollout by the live actors of its job."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from rlhfless_functions.api import Event, GenerationRequest, SampleTask
from rlhfless_operator.planner.moves.live_sizes import Batches
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.actors.generated import CompleteGroup, GenerationOutcome, grouped
from rlhfless_operator.training.actors.live_actor import Weights
from rlhfless_operator.training.actors.live_rollout import LiveRollout, LiveSettings
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.live_actors import LiveActors


def open_live_actors(run: TrainingRun, newer_versions: int, is_last: Callable[[], bool]) -> LiveActors:
    """Return the live actors of a job, without any yet.

    Args:
        newer_versions: expected number of newer versions that may be published while an actor decodes.
        is_last: see `LiveActors`.
    """
    relays, requests = run.relays, run.requests
    use = Weights(
        upcoming=lambda present: requests.next_weights(present, newer_versions, relays.chain),
        source=lambda present: requests.source_of(present, relays.chain),
        preload=requests.preload,
        on_use=lambda started, version, size: run.weights_traffic.read(started.instance, version, started.place, size),
    )
    longest = max(run.prompts.tokens("training"))
    act = run.spec.environment is not None
    return LiveActors(run.platform, run.generators, use, longest, is_last, act=act)


async def generate_live(
    run: TrainingRun,
    live: LiveActors,
    step: int,
    weights: SamplingWeights,
    plan: GenerationPlan,
    outcome: GenerationOutcome,
    arrivals: AsyncIterator[GenerationPlan] | None = None,
) -> AsyncGenerator[CompleteGroup, None]:
    """Generate a plan's groups, and yield each when its last sample has been published.

    Args:
        arrivals: plans of further groups. The last one ends it.

    Raises:
        StageFailedError: samples can't be finished.
    """

    def make_request(attempt: ActorAttempt) -> GenerationRequest:
        return run.requests.generate(
            step,
            "training",
            weights.oldest_version,
            None,
            run.draft_history.steps_for,
            attempt,
            weights_from=run.relays.chain(attempt.weights.version),
            further_prompts=plan.estimates,
        )

    def on_event(event: Event) -> None:
        run.progress.event(event)
        run.relays.heard(event, weights.now.version)

    settings = LiveSettings(
        step=step,
        sink_root=run.folder.rollouts(step, "training"),
        driver=run.lease.number,
        retries=run.spec.limits.retries,
        weights=weights,
        make_request=make_request,
        on_event=on_event,
    )

    async def take_in(arrivals: AsyncIterator[GenerationPlan]) -> None:
        try:
            async for fresh in arrivals:
                rollout.add(_groups(run, fresh))
                live.assign()
            rollout.is_whole()
        except Exception as error:
            # Otherwise the rollout would wait for groups that never come.
            rollout.fail(error)

    rollout = LiveRollout(_groups(run, plan), outcome, settings, grows=arrivals is not None)
    async with live.generating(rollout, _batches(plan)):
        taking_in = asyncio.create_task(take_in(arrivals)) if arrivals is not None else None
        try:
            while (group := await rollout.complete.get()) is not None:
                yield group
        finally:
            if taking_in is not None:
                taking_in.cancel()
    if rollout.error is not None:
        raise rollout.error


def _batches(plan: GenerationPlan) -> Batches:
    """Return the number of actors and their batches: those of the split, or an even part of the plan's samples."""
    split = plan.planned.split
    if split is not None:
        return Batches(split.actors, split.places, max(1, math.ceil(split.batch)), split.sequences)
    even = math.ceil(sum(map(len, plan.shares)) / len(plan.shares))
    return Batches(len(plan.shares), even, even)


def _groups(run: TrainingRun, plan: GenerationPlan) -> list[list[SampleTask]]:
    """Return the groups of a plan, those with the longest expected responses first."""
    longest = run.spec.sampling.max_response_tokens
    return sorted(grouped(plan.shares), key=lambda group: -plan.estimates[group[0].prompt].outlook(0, longest)[0])
