"""Generation and preparation of one step, overlapped; with dynamic sampling, in rounds."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, PrepareRequest, Purpose, SampleTask, WeightsReference
from rlhfless_operator.planner.lengths import PredictionReport, assess
from rlhfless_operator.platforms.base import Preload
from rlhfless_operator.records.journal import PlanRecord, StepBatch, mean_metrics
from rlhfless_operator.training.generated import CompleteGroup, GenerationOutcome
from rlhfless_operator.training.generation import GenerationSettings, generate
from rlhfless_operator.training.planning import GenerationPlan
from rlhfless_operator.training.preparation import PreparationOutcome, prepare, prepared_before
from rlhfless_operator.training.run import TrainingRun


class Rollout:
    """A step's rollout.

    Args:
        batch: what is to be learnt.
        conclude: writes down how it went, and learns from it for later plans.
    """

    def __init__(self, batch: BatchReference, conclude: Callable[[], StepBatch]) -> None:
        self.batch = batch
        self._conclude = conclude

    @cached_property
    def record(self) -> StepBatch:
        """How it went. To find out takes time that nobody should wait for: first asked while the learner works."""
        return self._conclude()


async def roll_out(
    run: TrainingRun, step: int, on_planned: Callable[[BatchReference, GenerationPlan], None]
) -> Rollout:
    """Draw, predict, plan, generate and prepare one step; or find that an earlier driver has done so.

    Args:
        on_planned: where learning takes the batch in pieces, told of it when its generation begins: of its samples in
            canonical order, and of the parts that are there.

    Raises:
        StageFailedError: generation or preparation can't be done.
    """
    recorded = run.folder.result("batch", step)
    # Asked beside each other: a store takes its time for each question, and instances wait.
    is_recorded, sinks, prepared = await asyncio.gather(
        asyncio.to_thread(artifacts.exists, recorded),
        asyncio.to_thread(_sinks_before, run.folder.rollouts(step, "training")),
        asyncio.to_thread(prepared_before, run.folder.batches(step, "training")),
    )
    if is_recorded:
        step_batch = StepBatch.model_validate(artifacts.read_json(recorded))
        run.cursor = run.cursor.restored(step_batch.cursor)
        return Rollout(step_batch.batch, lambda: step_batch)
    batch_settings = run.spec.batch
    weights = run.requests.weights(run.status.weights)
    generated = GenerationOutcome(sinks=sinks)
    started = time.monotonic()
    kept: list[int] = []
    flat: list[int] = []
    first_plan: GenerationPlan | None = None
    rounds = run.requests.algorithm.dynamic_sampling_rounds or 0
    preparation_seconds = 0.0
    for round_number in range(rounds + 1):
        count = batch_settings.prompts_per_step - len(kept)
        if count > run.prompts - len(kept) - len(flat):
            break
        prompts = run.cursor.draw(count, taken=[*kept, *flat])
        plan = run.plan(prompts, batch_settings.samples_per_prompt, "training")
        first_plan = first_plan or plan
        if run.requests.pieces > 1:
            # Rounds and pieces exclude each other.
            prompts = canonical_order(prompts, plan)
            on_planned(_reference(step, prepared, prompts, batch_settings.samples_per_prompt), plan)
        preparation_seconds += await generate_and_prepare(run, step, "training", weights, plan, generated, prepared)
        for prompt in prompts:
            (kept if rounds == 0 or prepared.groups[prompt].spread > 0 else flat).append(prompt)
        if len(kept) == batch_settings.prompts_per_step:
            break
        run.progress.note(f"round {round_number + 1}: {len(flat)} groups had equal rewards")
    assert first_plan is not None
    plan = first_plan
    generation_seconds = time.monotonic() - started - preparation_seconds
    # Where the rounds are used up, groups that teach nothing fill the batch.
    chosen = kept + flat[: batch_settings.prompts_per_step - len(kept)]
    batch = _reference(step, prepared, chosen, batch_settings.samples_per_prompt)

    def conclude() -> StepBatch:
        seconds = {"generation": generation_seconds, "preparation": preparation_seconds}
        record = _recorded(run, batch, plan, generated, prepared, seconds, replaced_groups=len(flat))
        run.keep_batch(step, record)
        return record

    return Rollout(batch, conclude)


def _recorded(
    run: TrainingRun,
    batch: BatchReference,
    plan: GenerationPlan,
    generated: GenerationOutcome,
    prepared: PreparationOutcome,
    seconds: dict[str, float],
    *,
    replaced_groups: int,
) -> StepBatch:
    run.cost_model.generated(generated, prepared, run.prompt_tokens("training"))
    lengths: dict[int, list[int]] = {}
    for (prompt, _), tokens in sorted(generated.lengths.items()):
        lengths.setdefault(prompt, []).append(tokens)
    report = assess(plan.estimates, {prompt: lengths[prompt] for prompt in plan.estimates})
    metrics = mean_metrics(prepared.sums)
    metrics["dynamic_sampling/replaced_groups"] = float(replaced_groups)
    metrics["generation/lost_instances"] = float(generated.lost)
    metrics["generation/cuts"] = float(generated.cuts)
    metrics["generation/moved_samples"] = float(generated.moved)
    metrics |= {f"generation/prefixes/{name}": value for name, value in generated.prefixes.items()}
    metrics["weights/seconds"] = generated.weights_seconds
    metrics["generation/seconds"] = seconds["generation"]
    metrics["planning/expected_seconds"] = plan.expected_generation_seconds
    metrics["planning/expected_step_seconds"] = plan.expected_step_seconds
    bound = run.cost_model.lower_bound(generated, run.prompt_tokens("training"), seconds["generation"])
    if bound is not None:
        metrics["planning/lower_bound_instance_seconds"] = bound
    metrics |= prediction_metrics(report)
    return StepBatch(
        batch=batch,
        cursor=run.cursor.state(),
        lengths=lengths,
        metrics=metrics,
        plan=PlanRecord(
            policy=plan.plan.policy,
            actors=len(plan.shares),
            expected_seconds=plan.plan.expected_seconds,
            expected_instance_seconds=plan.plan.expected_instance_seconds,
            cheapest_instance_seconds=plan.plan.cheapest_instance_seconds,
            lower_bound_instance_seconds=plan.plan.lower_bound_instance_seconds,
            rank_correlation=report.rank_correlation,
            relative_error=report.relative_error,
        ),
        seconds=seconds,
    )


async def generate_and_prepare(
    run: TrainingRun,
    step: int,
    purpose: Purpose,
    weights: WeightsReference,
    plan: GenerationPlan,
    generated: GenerationOutcome,
    prepared: PreparationOutcome,
) -> float:
    """Carry a plan out; both outcomes are filled in. Returns the seconds that preparation took beyond generation."""
    critic = run.requests.weights(run.status.critic) if run.status.critic else None
    preload = Preload(run.spec.model, weights, run.requests.engine)
    await run.capacity.use("generation", len(plan.shares), preload)
    await run.capacity.use("preparation", 1)
    if purpose == "training":
        run.capacity.expect("learning", 1, run.learner_preload, time_price=plan.time_price)
    run.progress.stage("generation" if purpose == "training" else purpose, actors=len(plan.shares))
    generated_at = time.monotonic()
    sharing = run.prefix_sharing(plan, purpose)

    async def hold(actors: int) -> None:
        await run.capacity.use("generation", actors)

    async def groups() -> AsyncGenerator[CompleteGroup, None]:
        nonlocal generated_at
        async for group in generate(
            run.platform,
            plan.shares,
            lambda part, attempt, samples, sink, resume_from, known_until: run.requests.generate(
                step,
                purpose,
                weights,
                part,
                attempt,
                samples,
                sink,
                resume_from,
                known_until,
                sharing,
            ),
            generated,
            GenerationSettings(
                sink_root=run.folder.rollouts(step, purpose),
                driver=run.lease.number,
                retries=run.spec.limits.retries,
                prompt_tokens=run.prompt_tokens(purpose).__getitem__,
            ),
            migration=run.cost_model.open_migration(plan),
            on_event=run.progress.event,
            on_actors=hold,
        ):
            yield group
        generated_at = time.monotonic()
        if purpose == "training":
            run.progress.stage("preparation")

    def make_request(part: str, attempt: int, chunk: Sequence[CompleteGroup]) -> PrepareRequest:
        samples = [sample for group in chunk for sample in group.samples]
        visits = {prompt: estimate.seen for prompt, estimate in plan.estimates.items()}
        rollouts = sorted({uri for group in chunk for uri in group.parts})
        return run.requests.prepare(step, purpose, weights, critic, part, attempt, samples, rollouts, visits)

    await prepare(
        run.platform,
        groups(),
        len(plan.estimates),
        make_request,
        prepared,
        driver=run.lease.number,
        retries=run.spec.limits.retries,
    )
    await run.capacity.use("preparation", 0)
    return time.monotonic() - generated_at


def prediction_metrics(report: PredictionReport) -> dict[str, float]:
    """How good a step's predicted lengths were, as metrics; what is not defined is left out."""
    numbers = {
        "seen_share": report.seen / report.prompts if report.prompts else None,
        "rank_correlation": report.rank_correlation,
        "prompt_rank_correlation": report.prompt_rank_correlation,
        "relative_error": report.relative_error,
        "bias": report.bias,
    }
    return {f"prediction/{name}": value for name, value in numbers.items() if value is not None}


def canonical_order(prompts: Sequence[int], plan: GenerationPlan) -> list[int]:
    """The order of learning in pieces: those that are expected to be complete first come first.

    It depends on predicted lengths, which are those of earlier steps, and not on how this one is carried out.
    """
    return sorted(prompts, key=lambda prompt: (plan.estimates[prompt].mean, prompt))


def _reference(step: int, prepared: PreparationOutcome, prompts: Sequence[int], samples: int) -> BatchReference:
    tasks = [SampleTask(prompt=prompt, index=index) for prompt in prompts for index in range(samples)]
    return BatchReference(step=step, parts=sorted(prepared.parts), samples=tasks)


def _sinks_before(folder: str) -> list[str]:
    """The sinks that earlier drivers of this step wrote to."""
    return sorted({uri.rsplit("/", 1)[0] for uri in artifacts.list_files(folder)})
