"""The record of a step's rollout, and the lessons for later plans."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from rlhfless_functions.api import GroupResult
from rlhfless_operator.planner.groups.staleness import staleness
from rlhfless_operator.planner.lengths import PredictionReport, assess
from rlhfless_operator.records.journal import PlanRecord, StepBatch, add_metrics, mean_metrics
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.costs.engine_factor import ENGINE_FACTOR
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.journal.samples import kept_examples
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.rollout import Rollout

_OF_A_ROLLOUT = ("dynamic_sampling/", "generation/", "weights/", "planning/", "prediction/")
"""Beginnings of the names of metrics that describe a whole rollout, not its groups."""
_COUNTS = {
    *(f"generation/{name}" for name in ("lost_instances", "cuts", "moved_samples", "switches", "passes")),
    *(f"generation/{name}" for name in ("kept_responses", "kept_tokens")),
    *(f"generation/drafts/{name}" for name in ("tried", "accepted", "seconds", "unreadable")),
    *(f"generation/prefixes/{name}_{way}" for name in ("tokens", "bytes", "seconds") for way in ("sent", "fetched")),
    *(f"weights/{name}" for name in ("bytes_fetched", "deltas", "deltas_refused", "bytes_relayed", "relays_refused")),
    "weights/prefetched",
    "generation/prefixes/seconds_waited",
}
_FETCHED = {
    "bytes": "bytes_fetched",
    "deltas": "deltas",
    "refused_deltas": "deltas_refused",
    "relayed_bytes": "bytes_relayed",
    "refused_sources": "relays_refused",
    "prefetched": "prefetched",
}


def record_rollout(run: TrainingRun, rollout: Rollout) -> StepBatch:
    """Learn the speed of the instances from a rollout, and return its record.

    It takes time that no instance should wait for. Call it while the learner works.
    """
    prompt_tokens = run.prompts.tokens("training")
    run.cost_model.generated(rollout.generated, rollout.prepared, prompt_tokens)
    run.letting_actors_go.learn(mean_metrics(rollout.prepared.sums))
    bound = run.cost_model.lower_bound(rollout.generated, prompt_tokens, rollout.seconds["generation"])
    by_prompt = groupby(sorted(rollout.generated.lengths.items()), key=lambda sample: sample[0][0])
    lengths = {prompt: [tokens for _, tokens in samples] for prompt, samples in by_prompt}
    plan = rollout.plan
    in_rounds = run.requests.algorithm.dynamic_sampling_rounds
    passes = {"dynamic_sampling/epoch": rollout.passes} if in_rounds else {}
    prepared = mean_metrics(rollout.prepared.sums)
    report = assess(plan.estimates, {prompt: lengths[prompt] for prompt in plan.estimates})
    predicted = report.metrics()
    factor = run.cost_model.engine_factor
    against_table = {} if factor is None else {ENGINE_FACTOR: factor}
    kept = _kept(rollout.generated.decoding) if run.spec.keeps_kv_cache else {}
    return StepBatch(
        batch=rollout.batch,
        cursor=rollout.cursor,
        lengths=lengths,
        metrics=prepared | _metrics(rollout, bound) | against_table | passes | kept | predicted,
        plan=plan_record(plan, report, prefixes=run.prefixes.reason),
        seconds=rollout.seconds,
        samples=kept_examples(rollout.prepared.examples, rollout.batch.samples, run.spec.tracking.sample_groups),
    )


def with_versions(batch: StepBatch, rollout: Rollout) -> StepBatch:
    """Add the versions of the weights that sampled a batch, if several may have."""
    prompts = dict.fromkeys(sample.prompt for sample in batch.batch.samples)
    groups = [rollout.prepared.groups[prompt] for prompt in prompts]
    # An emulated preparation reports no versions. Then the weights that the rollout began with count.
    versions = {group.prompt: group.sampled[0].version for group in groups if group.sampled}
    metrics = {
        "generation/switches": float(rollout.generated.switches),
        "generation/switched_responses": sum(group.switched_responses for group in groups) / len(batch.batch.samples),
        **_token_staleness(groups, batch.batch.step),
    }
    return batch.model_copy(update={"versions": versions, "metrics": batch.metrics | metrics})


def with_switches(batch: StepBatch, rollout: Rollout) -> StepBatch:
    """Add to a batch how often requests continued with newer weights."""
    switches = {"generation/switches": float(rollout.generated.switches)}
    return batch.model_copy(update={"metrics": batch.metrics | switches})


def rollout_metrics(
    rollouts: Sequence[Mapping[str, float]], *, switches: bool = False, kept: bool = False
) -> dict[str, float]:
    """Merge the metrics of rollouts that don't describe their groups: counts are added up, others are the newest
    rollout's.

    Args:
        rollouts: may be none. Counts are 0 then.
        switches: whether rollouts count their switches to newer weights.
        kept: whether they count responses that went on with the keys and values that they had.
    """
    counts = ["lost_instances", "cuts", "moved_samples"]
    counts += ["switches"] * switches + ["kept_responses", "kept_tokens"] * kept
    found = {f"generation/{name}": 0.0 for name in counts}
    for metrics in rollouts:
        for name, value in metrics.items():
            if name.startswith(_OF_A_ROLLOUT):
                found[name] = found.get(name, 0.0) + value if name in _COUNTS else value
    return found


def groups_metrics(groups: Sequence[GroupResult], step: int, *, switches: bool) -> dict[str, float]:
    """Return the metrics of the groups that a step learns from.

    Args:
        switches: whether several versions may have sampled a group.
    """
    sums: dict[str, float] = {}
    for group in groups:
        add_metrics(sums, group.metrics)
    return mean_metrics(sums) | (_token_staleness(groups, step) if switches else {})


def _token_staleness(groups: Sequence[GroupResult], step: int) -> dict[str, float]:
    """Return the mean staleness of the groups' tokens; nothing if an emulated preparation reports no versions."""
    tokens: Counter[int] = Counter()
    for sampled in (sampled for group in groups for sampled in group.sampled):
        tokens[sampled.version] += sampled.tokens
    stale = sum(staleness(step, version) * count for version, count in tokens.items())
    return {"generation/token_staleness": stale / tokens.total()} if tokens else {}


def _metrics(rollout: Rollout, bound: float | None) -> dict[str, float]:
    generated = rollout.generated
    return {
        "dynamic_sampling/rounds": float(rollout.rounds),
        "dynamic_sampling/replaced_groups": float(rollout.replaced_groups),
        "generation/lost_instances": float(generated.lost),
        "generation/cuts": float(generated.cuts),
        "generation/moved_samples": float(generated.moved),
        **_let_go(generated),
        **_decoding(generated.decoding),
        **{f"generation/prefixes/{name}": value for name, value in generated.prefixes.items()},
        "weights/seconds": generated.weights_seconds,
        **{f"weights/{_FETCHED[name]}": float(count) for name, count in generated.weights_fetched.items() if count},
        "generation/seconds": rollout.seconds["generation"],
        "preparation/instances": float(rollout.plan.planned.preparers),
        "planning/expected_seconds": rollout.plan.planned.expected_generation_seconds,
        "planning/expected_step_seconds": rollout.plan.planned.expected_seconds,
        "planning/contention": rollout.plan.wanted_by_others,
        **({} if bound is None else {"planning/lower_bound_instance_seconds": bound}),
    }


def _let_go(generated: GenerationOutcome) -> dict[str, float]:
    """Return the share of the actors' time in which they were let go; nothing if none was."""
    if not generated.let_go_seconds:
        return {}
    share = generated.let_go_seconds / (generated.let_go_seconds + generated.held_seconds)
    return {"generation/let_go": share}


def _decoding(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens per pass and the metrics of drafting; nothing if the engine does not count passes."""
    if not counts.get("sequence_passes"):
        return {}
    return {
        "generation/passes": float(counts["passes"]),
        "generation/tokens_per_pass": counts["tokens"] / counts["sequence_passes"],
        "generation/drafts/tried": float(counts["drafted"]),
        "generation/drafts/accepted": float(counts["accepted"]),
        **({"generation/drafts/coverage": counts["matched"] / counts["looked_up"]} if counts.get("looked_up") else {}),
        **({"generation/drafts/acceptance": counts["accepted"] / counts["judged"]} if counts.get("judged") else {}),
        "generation/drafts/seconds": counts["drafting_seconds"],
        "generation/drafts/unreadable": float(counts["unreadable"]),
    }


def _kept(counts: Mapping[str, float]) -> dict[str, float]:
    """Return how many tokens were generated on keys and values of older weights."""
    return {f"generation/{name}": float(counts.get(name, 0)) for name in ("kept_responses", "kept_tokens")}


def plan_record(plan: GenerationPlan, report: PredictionReport | None = None, *, prefixes: str = "") -> PlanRecord:
    """Return a plan in numbers, with the quality of its predicted lengths once that is known.

    Args:
        plan: of a rollout.
        report: on its predictions.
        prefixes: why its actors share prefixes or do not.
    """
    made = plan.planned.generation
    return PlanRecord(
        policy=made.policy,
        actors=len(plan.shares),
        expected_seconds=made.expected_seconds,
        expected_instance_seconds=made.expected_instance_seconds,
        cheapest_instance_seconds=made.cheapest_instance_seconds,
        lower_bound_instance_seconds=made.lower_bound_instance_seconds,
        rank_correlation=report.rank_correlation if report is not None else None,
        relative_error=report.relative_error if report is not None else None,
        preparers=plan.planned.preparers,
        preparers_reason=plan.planned.preparers_reason,
        holds=plan.planned.holds,
        holds_reason=plan.planned.holds_reason,
        prefixes=prefixes,
    )
