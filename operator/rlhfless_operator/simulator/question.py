"""The question of `rlhfless plan`, and what an earlier run answers: its lengths, drafts and environments."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.latency.drafting import Drafts
from rlhfless_operator.records.journal import read_lines
from rlhfless_operator.simulator.traces import LengthStatistics, read_trace
from rlhfless_operator.training.costs.measured_acting import ActingByToken, measured_acting
from rlhfless_operator.training.costs.measured_drafts import LAST_STEPS, measured_drafts


@dataclass(frozen=True)
class Question:
    """Values that a forecast takes besides the job; None is that of the job's `rehearsal`, or a default."""

    gpu: str | None = None
    gpus: int | None = None
    model: str | None = None
    trace: str | None = None
    acceptance: float | None = None
    """Chance that a drafted token is right; by default as the trace's run measured it."""
    median_tokens: float | None = None
    """Median tokens of responses if there is no trace; by default a quarter of the longest."""
    startup_seconds: float | None = None
    instance_hour: Decimal | None = None
    weights: Sequence[float] = ()
    deadline: float | None = None
    budget: Decimal | None = None


def lengths_of(job: RLHFJob, question: Question) -> tuple[Any, str]:
    """Return the lengths to forecast with, and where they are from.

    Raises:
        ValueError: naming a median that does not fit.
    """
    place = question.trace or (job.spec.rehearsal.trace if job.spec.rehearsal else None)
    sampling = job.spec.sampling
    if place is not None:
        trace = read_trace(place)
        return trace, f"those of {place}, {trace.prompts} prompts"
    median = question.median_tokens
    if median is None:
        median = sampling.max_response_tokens / 4
    if not 0 < median <= sampling.max_response_tokens:
        raise ValueError(
            f"median_tokens is {median:g}: it is above 0 and at most sampling.maxResponseTokens,"
            f" {sampling.max_response_tokens}, which is the nearest"
        )
    prompt_median = min(150.0, sampling.max_prompt_tokens / 2)
    statistics = LengthStatistics(
        median=median,
        longest=sampling.max_response_tokens,
        prompt_median=prompt_median,
        prompt_longest=sampling.max_prompt_tokens,
    )
    told = f"assumed: a median response of {median:g} tokens, 2 % truncated; a median prompt of {prompt_median:g}"
    return statistics, told


def tokens_per_pass(trace: str | None) -> float | None:
    """Return the mean over the last steps of the trace's run; None if there is no run, or it did not count passes."""
    if trace is None:
        return None
    steps = [
        line["metrics"]["generation/tokens_per_pass"]
        for line in read_lines(artifacts.join(trace, "metrics.jsonl"))
        if "generation/tokens_per_pass" in line.get("metrics", {})
    ][-LAST_STEPS:]
    return sum(steps) / len(steps) if steps else None


def drafts_of(job: RLHFJob, question: Question) -> Drafts | None:
    """Return the drafts of the forecast: as the question asks, or as the run measured them whose lengths it has.

    Raises:
        ValueError: naming an acceptance that does not fit.
    """
    generation, rehearsal = job.spec.generation, job.spec.rehearsal
    if question.acceptance is not None:
        if not 0 <= question.acceptance <= 1:
            nearest = min(1.0, max(0.0, question.acceptance))
            raise ValueError(
                f"acceptance is {question.acceptance:g}: a chance is between 0 and 1; the nearest is {nearest:g}"
            )
        if generation.drafting == "never":
            raise ValueError(
                "acceptance is given, and generation.drafting is never: set it to auto, as nothing is drafted otherwise"
            )
        return Drafts(1.0, question.acceptance)
    divided = generation.engine != "transformers" and generation.vllm.tensor_parallel_size > 1
    if generation.drafting == "never" or (rehearsal is None and divided):
        return None
    if rehearsal is not None and rehearsal.draft_acceptance is not None:
        return Drafts(rehearsal.draft_coverage, rehearsal.draft_acceptance)
    place = question.trace or (rehearsal.trace if rehearsal is not None else None)
    return None if place is None else measured_drafts(place)


def acting_of(job: RLHFJob, question: Question) -> ActingByToken | None:
    """Return how long and how much samples act in their environments, as a run measured it; None if none is known."""
    if job.spec.environment is None or question.trace is None:
        return None
    return measured_acting(question.trace)
