"""The forecast of a job: the seconds and the money of a step, from the job, its GPUs and response lengths."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from rlhfless_functions.api import STAGES, Stage
from rlhfless_operator.job.actor_range import ActorRange, preparer_range
from rlhfless_operator.job.charged import Charged
from rlhfless_operator.job.instance_gpus import needed_gpus
from rlhfless_operator.job.instance_prices import price_ratio
from rlhfless_operator.job.prices import BudgetSpec, PricesSpec
from rlhfless_operator.job.spec import RLHFJob, RLHFJobSpec
from rlhfless_operator.planner.latency.devices import (
    find_profile,
    is_measured,
    learning_token_seconds,
    preparation_token_seconds,
)
from rlhfless_operator.planner.latency.drafting import DraftedLatency, Drafts
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.latency.roofline import GPUS, ModelShape
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import InfeasibleError, Limits
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.simulator.fitting import Fit, fit_job
from rlhfless_operator.simulator.forecast import Forecast, Others, distinct, matching_actors, typical_step, undominated
from rlhfless_operator.simulator.hardware import Hardware, Surroundings, find_hardware
from rlhfless_operator.simulator.question import Question, acting_of, drafts_of, lengths_of, tokens_per_pass
from rlhfless_operator.simulator.scenarios import GPU_HOUR, store_seconds
from rlhfless_operator.training.costs.engine_factor import measured_factor
from rlhfless_operator.training.costs.measured_acting import ActingByToken
from rlhfless_operator.training.costs.model_shape import AskHub, find_shape
from rlhfless_operator.training.requests.builder import RequestBuilder

OPTIMIZER_SECONDS = 0.25
"""Time of the optimizer's step."""
ADAPTER_SECONDS = 0.25
"""Time of the publication of an adapter."""
STARTUP_SECONDS = 30.0
"""From asking for an instance to its being ready: the shortest full start, of 30 to 135 s."""


def forecast_job(job: RLHFJob, question: Question, around: Surroundings, ask_hub: AskHub | None) -> dict[str, Any]:
    """Forecast a step of the job.

    Args:
        around: the surroundings of this process, which have the GPUs if the question names none.
        ask_hub: asks a hub about a model that this machine does not know.

    Returns:
        `{"job", "model", "gpu", "gpus", "memory": {stage: bytes on each of its GPUs}, "chosen", "actors_at_most",
        "actors_by", "measured", "engine_factor", "lengths", "acts", "acting": {"away", "given"}, "drafting",
        "tokens_per_pass", "drafts", "currency", "instance_hour", "steps", "plans": [{"cost_weight", "actors",
        "learner_gpus", "seconds", "generation_seconds", "gpu_seconds", "lower_bound_gpu_seconds", "cost"}], "front",
        "ahead": [{"max_staleness", "actors", "preparers", "preparers_reason", "seconds", "generation_busy",
        "learning_busy", "staleness", "gpu_seconds", "cost"}], "beside": [as in "ahead"], "matching_actors",
        "learner_gpus", "within_deadline", "within_budget"}`: of a step; seconds are of the whole step, money is a
        decimal string.

    Raises:
        ValueError: naming what can't be forecast, and the nearest that can.
    """
    if around.settings is not None:
        job = job.on_cluster(around.settings.pods)
    spec = job.spec
    shape = _shape(job, question, ask_hub)
    hardware, fit = _hardware(job, question, around, shape)
    gpu, gpus, actors = hardware.gpu, hardware.gpus, hardware.actors
    factor, drafts = measured_factor(question.trace), drafts_of(job, question)
    instance = _as_measured(_instance(job, question, shape, hardware), factor, drafts)
    prices, priced_by = _prices(job, question, gpu, fit)
    lengths, told = lengths_of(job, question)
    acting = acting_of(job, question)
    samples = _samples(spec, lengths, acting)
    preparation = _preparation_seconds(job, samples, shape, gpu)
    learning = {learner: _learning_seconds(job, samples, shape, gpu, learner) for learner in fit.learners}
    others = {
        learner: _others(job, preparation, seconds, _publishing_seconds(job, shape, learner), prices, learner, fit)
        for learner, seconds in learning.items()
    }
    forecasts = _forecasts(spec, samples, instance, hardware, prices, others)
    forecast = forecasts[fit.learner]
    front = distinct(undominated([row for each in forecasts.values() for row in each.front()]))
    _check_budget(spec.budget, forecast, front)
    most_stale = 0 if spec.asynchronous is None else spec.asynchronous.max_staleness
    ahead, beside = _long_runs(spec, forecast, most_stale)
    return {
        "job": job.metadata.name,
        "model": shape.name,
        "gpu": gpu,
        "gpus": gpus,
        "memory": fit.bytes,
        "chosen": fit.chosen,
        "actors_at_most": actors.most,
        "actors_by": hardware.actors_by,
        "measured": is_measured(shape, gpu, gpus),
        "engine_factor": factor,
        "startup_seconds": instance.startup_seconds,
        "max_staleness": most_stale,
        "ahead": ahead,
        "beside": beside,
        "matching_actors": matching_actors(beside),
        "lengths": told,
        "acts": spec.environment is not None,
        "acting": None if acting is None else {"away": acting.away, "given": acting.given},
        "drafting": spec.generation.drafting,
        "tokens_per_pass": tokens_per_pass(question.trace),
        "drafts": None if drafts is None else {"coverage": drafts.coverage, "acceptance": drafts.acceptance},
        "currency": spec.prices.currency,
        "instance_hour": f"{prices['generation']:f}",
        "priced_by": priced_by,
        "steps": spec.steps,
        "learning_seconds": learning[fit.learner],
        "publishing_seconds": _publishing_seconds(job, shape, fit.learner),
        "learns_beside": spec.may_learn_in_pieces,
        "preparation_seconds": preparation,
        "learner_gpus": fit.learner,
        "plans": [forecast.weighted(weight) for weight in question.weights],
        "front": front,
        "within_deadline": _within_deadline(forecasts.values(), question.deadline),
        "within_budget": _within_budget(forecasts.values(), question.budget),
    }


def _long_runs(
    spec: RLHFJobSpec, forecast: Forecast, most_stale: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of rollouts that go ahead, and of actors beside the learner. They count no time in environments,
    so a job with environments gets none."""
    if spec.environment is not None:
        return [], []
    stale = sorted({1, 2, most_stale} - {0})
    return forecast.ahead(spec.planning.cost_weight, stale), forecast.actors_beside(most_stale or 1)


def _forecasts(
    spec: RLHFJobSpec,
    samples: Sequence[SampleLoad],
    instance: InstanceProfile,
    hardware: Hardware,
    prices: Mapping[Charged, Decimal],
    others: Mapping[int, Others],
) -> dict[int, Forecast]:
    """Return the forecast for each number of learner's GPUs."""
    by_stage: dict[Stage, int] = {**needed_gpus(spec), "generation": hardware.gpus}
    preparers = preparer_range(spec, hardware.actors, by_stage)
    limits = _limits(spec, hardware.actors, instance)
    return {
        learner: Forecast(
            samples,
            instance,
            limits,
            instance_hour=prices["generation"],
            others=each,
            preparers=(preparers.least, preparers.most),
        )
        for learner, each in others.items()
    }


def _hardware(job: RLHFJob, question: Question, around: Surroundings, shape: ModelShape) -> tuple[Hardware, Fit]:
    """Return the GPUs of an instance, and how the job fits on them."""
    fits: dict[str, Fit] = {}

    def gpus_on(gpu: str) -> int:
        fits[gpu] = fit_job(job.spec, shape, GPUS[gpu], question.gpus)
        return fits[gpu].tensor_parallel

    hardware = find_hardware(job, question.gpu, around, gpus_on)
    return hardware, fits[hardware.gpu]


def _as_measured(instance: InstanceProfile, factor: float | None, drafts: Drafts | None) -> InstanceProfile:
    """Return an instance with the engine's measured factor and with drafts, where there are any."""
    if factor is not None:
        instance = replace(instance, latency=instance.latency.lines[0].times(factor))
    if drafts is not None:
        instance = replace(instance, latency=DraftedLatency(instance.latency.lines[0], drafts))
    return instance


def _samples(spec: RLHFJobSpec, lengths: Any, acting: ActingByToken | None) -> list[SampleLoad]:
    """Return the groups of a step. What environments give is read and kept, and never decoded."""
    batch, longest = spec.batch, spec.sampling.max_response_tokens
    found = typical_step(lengths, prompts=batch.prompts_per_step, samples=batch.samples_per_prompt, longest=longest)
    if acting is None:
        return found
    return [
        replace(
            each,
            prompt_tokens=each.prompt_tokens + round(each.expected_tokens * acting.given),
            away_seconds=each.expected_tokens * acting.away,
        )
        for each in found
    ]


def _limits(spec: RLHFJobSpec, actors: ActorRange, instance: InstanceProfile) -> Limits:
    kv_tokens = min(instance.kv_tokens, spec.generation.kv_budget_tokens or instance.kv_tokens)
    return Limits(actors.least, actors.most, kv_tokens, 256)


def _shape(job: RLHFJob, question: Question, ask_hub: AskHub | None) -> ModelShape:
    """Return the shape of the model."""
    model, rehearsal = job.spec.model, job.spec.rehearsal
    named = question.model or (rehearsal.model if rehearsal else None)
    if named:
        return find_shape(named, "model", revision=None, ask_hub=ask_hub)
    return find_shape(model.source, "model.source", revision=model.revision, ask_hub=ask_hub)


def _instance(job: RLHFJob, question: Question, shape: ModelShape, hardware: Hardware) -> InstanceProfile:
    """Return the profile of a generation instance, without drafts."""
    rehearsal, startup = job.spec.rehearsal, question.startup_seconds
    if startup is None:
        startup = rehearsal.startup if rehearsal else STARTUP_SECONDS
    return find_profile(shape, hardware.gpu, hardware.gpus, startup_seconds=startup)


def _check_budget(budget: BudgetSpec | None, forecast: Forecast, front: Sequence[dict[str, Any]]) -> None:
    """Refuse a budget of the job that is not enough for one step."""
    if budget is None:
        return
    if budget.money is not None:
        try:
            forecast.within_budget(budget.money)
        except InfeasibleError as error:
            raise ValueError(f"spec.budget.money: not enough for one step: {error}; raise it") from error
    least = min(row["gpu_seconds"] for row in front) / 3600
    if budget.gpu_hours is not None and budget.gpu_hours < least:
        raise ValueError(
            f"spec.budget.gpuHours: not enough for one step: budget is {budget.gpu_hours:g}: the cheapest plan takes"
            f" {least:.4g} GPU-hours a step, which is the nearest; raise it"
        )


def _within_deadline(forecasts: Iterable[Forecast], seconds: float | None) -> dict[str, Any] | None:
    """Return the cheapest plan of any learner in time."""
    if seconds is None:
        return None
    rows = _possible(reversed(list(forecasts)), lambda forecast: forecast.within_deadline(seconds))
    return min(rows, key=lambda row: (Decimal(row["cost"]), row["seconds"]))


def _within_budget(forecasts: Iterable[Forecast], money: Decimal | None) -> dict[str, Any] | None:
    """Return the fastest plan of any learner for this money."""
    if money is None:
        return None
    rows = _possible(forecasts, lambda forecast: forecast.within_budget(money))
    return min(rows, key=lambda row: (row["seconds"], Decimal(row["cost"])))


def _possible(forecasts: Iterable[Forecast], plan: Callable[[Forecast], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the plans that there are.

    Args:
        forecasts: of all learners, the one first that comes nearest to what is asked.

    Raises:
        InfeasibleError: there is none.
    """
    rows, errors = [], []
    for forecast in forecasts:
        try:
            rows.append(plan(forecast))
        except InfeasibleError as error:
            errors.append(error)
    if not rows:
        raise errors[0]
    return rows


def _tokens(samples: Sequence[SampleLoad]) -> float:
    return sum(each.prompt_tokens + each.expected_tokens for each in samples)


def _preparation_seconds(job: RLHFJob, samples: Sequence[SampleLoad], shape: ModelShape, gpu: str) -> float:
    """Return the seconds of preparation on one instance."""
    gpus, passes = needed_gpus(job.spec)["preparation"], RequestBuilder(job, JobFolder(""), "").passes
    return _tokens(samples) * preparation_token_seconds(shape, gpu, gpus, passes.preparation)


def _learning_seconds(job: RLHFJob, samples: Sequence[SampleLoad], shape: ModelShape, gpu: str, gpus: int) -> float:
    """Return the seconds of learning, without the optimizer's step."""
    passes = RequestBuilder(job, JobFolder(""), "").passes
    return _tokens(samples) * learning_token_seconds(shape, gpu, gpus, passes.learning)


def _prices(job: RLHFJob, question: Question, gpu: str, fit: Fit) -> tuple[Mapping[Charged, Decimal], str]:
    """Return the price of an instance of each stage for an hour, of all learning instances together, and its source."""
    if question.instance_hour is not None:
        same: dict[Charged, Decimal] = dict.fromkeys(STAGES, question.instance_hour)
        return same, "--instance-hour"
    if job.spec.prices.given:
        plain = job.spec.prices.model_copy(update={"currency": "USD"}) == PricesSpec(
            instance_hour=job.spec.prices.instance_hour
        )
        return job.spec.instance_prices, "prices.instanceHour" if plain else "prices"
    if gpu not in GPU_HOUR:
        raise ValueError(f"prices.instanceHour is missing and no price of {gpu} is known here: give --instance-hour")
    each = {**needed_gpus(job.spec), "generation": fit.tensor_parallel, "learning": fit.learner}
    prices: dict[Charged, Decimal] = {stage: Decimal(f"{GPU_HOUR[gpu] * each[stage]:.4f}") for stage in STAGES}
    return prices, f"{fit.tensor_parallel} × {gpu} of AWS on demand"


def _publishing_seconds(job: RLHFJob, shape: ModelShape, learner: int) -> float:
    """Return the seconds from the optimizer's step to the new weights in the store. The learner of an asynchronous job
    can take the next step meanwhile."""
    return ADAPTER_SECONDS if job.spec.model.lora is not None else store_seconds(shape.weight_bytes, learner)


def _others(
    job: RLHFJob,
    preparation: float,
    learning: float,
    publishing: float,
    prices: Mapping[Charged, Decimal],
    learner: int,
    fit: Fit,
) -> Others:
    """Return the time and cost of a step besides generation.

    Args:
        preparation: seconds.
        learning: seconds of gradients.
        publishing: seconds.
        prices: of an hour of an instance of each stage, the learner with the GPUs of `fit`.
        learner: GPUs that learn.
    """
    dear = price_ratio(prices, "learning") * learner / fit.learner
    whole = learning + OPTIMIZER_SECONDS + publishing
    paid = preparation * price_ratio(prices, "preparation") + whole * dear
    gpu_seconds = preparation * needed_gpus(job.spec)["preparation"] + whole * learner
    return Others(
        whole,
        gpu_seconds,
        paid,
        preparation,
        learner_gpus=learner,
        learner_price=float(dear),
        publishing=publishing,
        beside=learning if job.spec.may_learn_in_pieces else 0.0,
    )
