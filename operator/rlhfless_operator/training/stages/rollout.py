"""A step's rollout: generation and preparation, overlapped."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    BatchReference,
    Event,
    PrepareRequest,
    PrepareResult,
    Purpose,
    SampleTask,
    WeightsReference,
)
from rlhfless_operator.planner.groups.dynamic_sampling import SamplingRounds
from rlhfless_operator.planner.moves.migration import Migration
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.training.actors.generated import CompleteGroup, GenerationOutcome
from rlhfless_operator.training.actors.prepared import PreparationOutcome
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.costs.prefix_sharing import PrefixSharing
from rlhfless_operator.training.instances.away import Away
from rlhfless_operator.training.instances.weights_traffic import ReadsOfVersion
from rlhfless_operator.training.journal.samples import training_examples
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.generation import generate
from rlhfless_operator.training.stages.generation_settings import settings_of
from rlhfless_operator.training.stages.holding import hold_as_planned
from rlhfless_operator.training.stages.live_actors import LiveActors
from rlhfless_operator.training.stages.live_generation import generate_live
from rlhfless_operator.training.stages.piece_journal import PieceJournal
from rlhfless_operator.training.stages.prefix_plans import consider_prefixes, could_share
from rlhfless_operator.training.stages.preparation import forget_prepared, prepare, prepared_before
from rlhfless_operator.training.stages.replacing import Replacing
from rlhfless_operator.training.stages.rollout_watch import RolloutWatch, expect_learner
from rlhfless_operator.training.stages.unscorable import UnscorableError, check_unscorable


@dataclass(frozen=True)
class RolloutTask:
    """The rollout to make, and the models for it."""

    step: int
    purpose: Purpose
    policy: SamplingWeights
    critic: WeightsReference | None = None
    """Value model that preparation asks, if it asks one."""
    prompts: Sequence[int] | None = None
    """Prompts that are drawn already; None if the rollout draws them."""
    on_plan: Callable[[GenerationPlan], None] | None = None
    """Called with the plan."""
    on_prepared: Callable[[PrepareResult], None] | None = None
    """Called with each prepared chunk, if groups are learnt from as they come."""
    live: LiveActors | None = None
    """The job's live actors; None if the rollout has actors of its own."""
    on_forecast: Callable[[float], bool] = lambda left: False
    """Called with the seconds until the learner has work; returns whether it is being let go or loads its state."""


@dataclass
class Rollout:
    """The batch to learn from, and how it was made."""

    batch: BatchReference
    plan: GenerationPlan
    """Plan of the step, without prompts that replaced others."""
    generated: GenerationOutcome
    prepared: PreparationOutcome
    cursor: dict[str, Any]
    """Position in the training data after its prompts."""
    passes: float
    """Passes over the training data that its prompts and all before make."""
    seconds: dict[str, float]
    """Seconds of generation, and of preparation after it."""
    rounds: int
    """Number of rounds of dynamic sampling; 1 without it."""
    replaced_groups: int
    """Number of groups that taught nothing and were replaced by others."""


async def roll_out(
    run: TrainingRun, task: RolloutTask, on_planned: Callable[[BatchReference, GenerationPlan, PieceJournal], None]
) -> Rollout | StepBatch:
    """Draw, predict, plan, generate and prepare one step, or find the rollout that an earlier driver has written down.

    Args:
        on_planned: called when generation begins, with the samples, the plan and the piece journal, if learning takes
            the batch in pieces.

    Raises:
        StageFailedError: generation or preparation can't be done.
        UnscorableError: too few of the samples have a reward.
    """
    recorded, generated, prepared = await _made_before(run, task)
    if recorded is not None:
        if task.prompts is None:
            run.prompts.go_to(recorded.cursor)
            _settle(run, task.step)
        return recorded
    samples, started = run.spec.batch.samples_per_prompt, time.monotonic()
    replacements = run.requests.algorithm.dynamic_sampling_rounds or 0
    groups = run.spec.batch.prompts_per_step if task.prompts is None else len(task.prompts)
    rounds = SamplingRounds(groups, replacements, run.prompts.count, run.prompts.left)
    journal: PieceJournal | None = None
    prompts = run.prompts.cursor.draw(rounds.count) if task.prompts is None else list(task.prompts)
    rounds.draw(prompts)
    # Another rollout may draw before this one is complete.
    cursor, passes = run.prompts.cursor.state(), run.prompts.passes
    plan = run.plans.plan(prompts, samples, "training")
    await hold_as_planned(run, task.step, plan)
    if task.on_plan is not None:
        task.on_plan(plan)
    if run.requests.learns_in_pieces and task.prompts is None:
        # Dynamic sampling and pieces exclude each other.
        reference = _reference(task.step, prepared, prompts, samples)
        journal = await asyncio.to_thread(_open_journal, run, reference, prepared)
        on_planned(reference, plan, journal)
    if replacements:
        replacing = Replacing(run, rounds, plan, prepared.groups)
        preparation_seconds = await generate_and_prepare(
            run, task, replacing.plan, generated, prepared, replacing.examples, replacing=replacing
        )
        cursor, passes = run.prompts.cursor.state(), run.prompts.passes
        if note := rounds.note(task.step):
            run.progress.note(note)
    else:
        examples = training_examples(prompts, run.spec.tracking.sample_groups, samples)
        preparation_seconds = await generate_and_prepare(run, task, plan, generated, prepared, examples, journal)
    if task.prompts is None:
        _settle(run, task.step)
    await _check_scored(run, task, prepared)
    seconds = time.monotonic() - started
    run.cost_model.history.add("rollout", seconds)
    return Rollout(
        batch=journal.batch(task.step) if journal else _reference(task.step, prepared, rounds.chosen, samples),
        plan=plan,
        generated=generated,
        prepared=prepared,
        cursor=cursor,
        passes=passes,
        seconds={"generation": seconds - preparation_seconds, "preparation": preparation_seconds},
        rounds=rounds.done,
        replaced_groups=rounds.replaced,
    )


def _settle(run: TrainingRun, step: int) -> None:
    if note := run.prompts.settle(step):
        run.progress.note(note)


async def _made_before(
    run: TrainingRun, task: RolloutTask
) -> tuple[StepBatch | None, GenerationOutcome, PreparationOutcome]:
    """Return what earlier drivers have made of a rollout: its record if it is complete, and what there is of it."""
    recorded = run.folder.result("batch", task.step)
    # Asked beside each other: a store takes its time for each question, and instances wait.
    is_recorded, sinks, prepared = await asyncio.gather(
        asyncio.to_thread(artifacts.exists, recorded),
        asyncio.to_thread(_sinks_before, run.folder.rollouts(task.step, "training")),
        asyncio.to_thread(prepared_before, run.folder.batches(task.step, "training")),
    )
    batch = StepBatch.model_validate(await asyncio.to_thread(artifacts.read_json, recorded)) if is_recorded else None
    return batch, GenerationOutcome(sinks=sinks), prepared


async def _check_scored(run: TrainingRun, task: RolloutTask, prepared: PreparationOutcome) -> None:
    """Raise UnscorableError if too few samples, those of replaced groups included, have a reward."""
    try:
        check_unscorable(prepared.sums, run.spec.rewards, run.spec.limits.unscorable, f"step {task.step}")
    except UnscorableError:
        # The generated samples stay. They are scored again once the rewards are mended.
        folder = run.folder.batches(task.step, task.purpose)
        forget = artifacts.remove if task.on_prepared is None else forget_prepared
        await asyncio.to_thread(run.lease.fenced, forget, folder)
        raise


async def generate_and_prepare(
    run: TrainingRun,
    task: RolloutTask,
    plan: GenerationPlan,
    generated: GenerationOutcome,
    prepared: PreparationOutcome,
    examples: Collection[SampleTask],
    journal: PieceJournal | None = None,
    *,
    replacing: Replacing | None = None,
) -> float:
    """Carry a plan out; fill in both outcomes. Return the seconds that preparation took after generation.

    Args:
        examples: samples to be had as text.
        journal: receives the prepared chunks, if the batch is learnt from in pieces.
        replacing: draws fresh prompts for groups that teach nothing, if any does.
    """
    if task.purpose == "training" and task.live is None:
        consider_prefixes(run, task.step, plan)
    watched, migration = run.follows_forecasts, run.cost_model.open_migration(plan)

    async def arrivals(replacing: Replacing) -> AsyncGenerator[GenerationPlan, None]:
        async for fresh in replacing.arrivals():
            watch.more_is_generated()
            yield fresh

    async with AsyncExitStack() as parts:
        choice = run.letting_actors_go.rollout(f"{task.purpose}-{task.step}", len(plan.shares))
        away = await parts.enter_async_context(choice)
        fresh = arrivals(replacing) if replacing is not None else None
        generation = await _begin_generation(run, task, plan, generated, migration, away, parts, fresh)
        left = 0 if watched else None
        preparers = await parts.enter_async_context(run.preparers.part(task.step, plan.planned.preparers, left=left))
        may_go_on = replacing.may_go_on if replacing is not None else lambda: False
        watch = RolloutWatch(
            run, task.purpose, plan, migration, generated, prepared, preparers, task.on_forecast, may_go_on
        )
        stage = "generation" if task.purpose == "training" else task.purpose
        run.progress.stage(stage, step=task.step, actors=len(plan.shares))
        if task.purpose == "training" and not run.follows_forecasts:
            await expect_learner(run, plan.planned.expected_generation_seconds)
        generated_at = time.monotonic()

        async def groups() -> AsyncGenerator[CompleteGroup | None, None]:
            nonlocal generated_at
            numbers = itertools.count(1)
            async for group in generation:
                yield group
                # Fresh prompts may join the plan.
                if next(numbers) == len(plan.estimates):
                    generated_at = time.monotonic()
                    if watched:
                        await watch.all_is_generated()
                    if task.purpose == "training":
                        run.progress.stage("preparation", step=task.step)
                    yield None

        async with watch.under_way() if watched else nullcontext():
            await prepare(
                run.platform,
                groups(),
                len(plan.estimates),
                _preparation_requests(run, task, plan, examples),
                prepared,
                instances=preparers,
                driver=run.lease.number,
                retries=run.spec.limits.retries,
                on_prepared=_on_prepared(run, task, journal, replacing),
                followed=journal is not None and not run.capacity.sleeps,
            )
    run.progress.over(stage, task.step)
    return time.monotonic() - generated_at


async def _begin_generation(
    run: TrainingRun,
    task: RolloutTask,
    plan: GenerationPlan,
    generated: GenerationOutcome,
    migration: Migration,
    away: Away | None,
    parts: AsyncExitStack,
    arrivals: AsyncIterator[GenerationPlan] | None,
) -> AsyncGenerator[CompleteGroup, None]:
    """Return the groups of a plan, and of those that arrive, as they become complete. Actors of its own have instances
    until `parts` is left."""
    if task.live is not None:
        return generate_live(run, task.live, task.step, task.policy, plan, generated, arrivals)
    preload = run.requests.preload(task.policy.now)
    generators = await parts.enter_async_context(run.generators.part(task.step, len(plan.shares), preload))
    sharing = _sharing(run, task, plan)
    generated.shares_prefixes |= sharing is not None
    reads = ReadsOfVersion(run.weights_traffic)

    def on_event(actor: str, event: Event) -> None:
        run.progress.event(event)
        reads(actor, event)
        run.relays.heard(event, reads.version_of(actor))

    return generate(
        run.platform,
        plan.shares,
        generated,
        settings_of(run, task.step, task.purpose, task.policy.begun, plan, reads, sharing, away),
        migration=migration,
        instances=generators,
        on_event=on_event,
        arrivals=arrivals,
    )


def _sharing(run: TrainingRun, task: RolloutTask, plan: GenerationPlan) -> PrefixSharing | None:
    """Return the prefixes that a rollout's actors share; None if they share none."""
    if not run.prefixes.able or len(plan.shares) == 1:
        return None
    sharing = could_share(run, task.purpose, plan)
    return sharing if sharing is not None and run.prefixes.used(sharing) else None


def _preparation_requests(
    run: TrainingRun, task: RolloutTask, plan: GenerationPlan, examples: Collection[SampleTask]
) -> Callable[[str, Sequence[CompleteGroup], int], PrepareRequest]:
    """Return what makes the request for a chunk: by the name of its part, its groups, and the attempt."""

    def make_request(part: str, chunk: Sequence[CompleteGroup], attempt: int) -> PrepareRequest:
        return run.requests.prepare(
            task.step,
            task.purpose,
            task.policy.begun,
            task.critic,
            part,
            attempt,
            [sample for group in chunk for sample in group.samples],
            sorted({uri for group in chunk for uri in group.parts}),
            {group.prompt: plan.estimates[group.prompt].seen for group in chunk},
            examples,
            by_group=task.on_prepared is not None,
            progress=run.prompts.progress(task.step, task.purpose),
        )

    return make_request


def _on_prepared(
    run: TrainingRun, task: RolloutTask, journal: PieceJournal | None, replacing: Replacing | None
) -> Callable[[PrepareResult], Awaitable[None]] | None:
    """Return what is told of every prepared chunk; None where nothing goes by groups as they come."""
    if journal is None and task.on_prepared is None and replacing is None:
        return None

    async def tell(result: PrepareResult) -> None:
        if replacing is not None:
            replacing.prepared(result)
        if task.on_prepared is not None:
            task.on_prepared(result)
        if journal is not None:
            tasks = samples_of([group.prompt for group in result.groups], run.spec.batch.samples_per_prompt)
            await asyncio.to_thread(journal.prepared, tasks, result.part)

    return tell


def _reference(step: int, prepared: PreparationOutcome, prompts: Sequence[int], samples: int) -> BatchReference:
    return BatchReference(step=step, parts=sorted(prepared.chunks), samples=samples_of(prompts, samples))


def _open_journal(run: TrainingRun, reference: BatchReference, prepared: PreparationOutcome) -> PieceJournal:
    """Open the journal of a step's pieces. Add the chunks that an earlier driver had prepared and not written there."""
    journal = PieceJournal(run.folder.pieces(reference.step))
    for part, prompts in sorted(prepared.chunks.items()):
        journal.prepared(samples_of(prompts, run.spec.batch.samples_per_prompt), part)
    return journal


def samples_of(prompts: Iterable[int], samples_per_prompt: int) -> list[SampleTask]:
    """Return whole groups, sample by sample."""
    return [SampleTask(prompt=prompt, index=index) for prompt in prompts for index in range(samples_per_prompt)]


def _sinks_before(folder: str) -> list[str]:
    """Return the sinks that earlier drivers of this step wrote to."""
    return sorted({uri.rsplit("/", 1)[0] for uri in artifacts.list_files(folder)})
