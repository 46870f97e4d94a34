"""Rules that span several fields of a job, each written once for Python and once for the API server (CEL)."""

from collections.abc import Sequence
from typing import get_args

from rlhfless_functions.settings import AlgorithmName, AlgorithmSettings, RewardSettings
from rlhfless_operator.job.async_rules import ASYNC_RULES
from rlhfless_operator.job.environment_rules import ENVIRONMENT_RULES
from rlhfless_operator.job.instance_prices import unknown_price
from rlhfless_operator.job.rule import CelRule, Rule
from rlhfless_operator.job.sections import JobFields

_MOST_SAMPLES = 65536
"""Most samples of a step. Planning one job must not keep the operator from all others."""


def _one_length(spec: JobFields) -> str | None:
    if spec.steps is not None and spec.epochs is not None:
        return "steps and epochs are both given; remove one"
    if spec.steps is None and spec.epochs is None:
        return "missing; set steps or epochs to say how long to train"
    return None


def _rewards_of_evaluation(spec: JobFields) -> Sequence[RewardSettings]:
    return (spec.evaluation.rewards if spec.evaluation else None) or ()


def _names_differ(rewards: Sequence[RewardSettings]) -> str | None:
    names = [reward.name for reward in rewards]
    repeated = sorted({name for name in names if names.count(name) > 1})
    return f"the name {repeated[0]} is given to several rewards; give each its own" if repeated else None


def _group_is_larger_than_one(spec: JobFields) -> str | None:
    algorithm = spec.algorithm.resolved()
    if spec.batch.samples_per_prompt >= 2:
        return None
    if algorithm.advantage in ("group", "leave_one_out"):
        return f"{algorithm.name} compares the samples of a prompt (advantage: {algorithm.advantage}); write 2 or more"
    if algorithm.dynamic_sampling_rounds:
        return (
            "algorithm.dynamicSamplingRounds replaces prompts whose samples all got the same reward, which is always so"
            " for a single sample; write 2 or more, or dynamicSamplingRounds: 0"
        )
    return None


def _muon_has_whole_matrices(spec: JobFields) -> str | None:
    processes, instances = spec.learning.processes or 1, spec.learning.instances.max
    if spec.optimizer.name == "muon" and processes > 1:
        return (
            f"muon needs whole matrices, but each of {processes} processes holds only parts of them;"
            " write adamw, or set learning.processes to 1"
        )
    if spec.optimizer.name == "muon" and instances > 1:
        return (
            f"muon needs whole matrices, but each of {instances} instances holds only parts of them;"
            " write adamw, or set learning.instances.max to 1"
        )
    return None


def _is_a_range(least: int, most: int | None) -> str | None:
    if most is not None and least > most:
        return f"min {least} is more than max {most}; raise max or lower min"
    return None


def _learners_are_a_range(spec: JobFields) -> str | None:
    instances = spec.learning.instances
    if reversed_range := _is_a_range(instances.min, instances.max):
        return reversed_range
    if instances.max > 1 and spec.rehearsal is not None:
        return f"a rehearsal emulates one learning instance, not {instances.max}; write max: 1"
    return None


def _step_is_plannable(spec: JobFields) -> str | None:
    samples = spec.batch.prompts_per_step * spec.batch.samples_per_prompt
    if samples > _MOST_SAMPLES:
        return f"a step has {samples} samples, more than the limit of {_MOST_SAMPLES}; lower one of the two"
    return None


def _best_is_evaluated(spec: JobFields) -> str | None:
    if spec.checkpoints.best and spec.evaluation is None:
        return "finding the best weights needs evaluations; add spec.evaluation, or remove this"
    return None


def _greedy_evaluation_samples_once(spec: JobFields) -> str | None:
    evaluation = spec.evaluation
    if evaluation is not None and evaluation.sampling.temperature == 0 and evaluation.samples_per_prompt > 1:
        return (
            f"all {evaluation.samples_per_prompt} responses to a prompt would be the same at"
            " evaluation.sampling.temperature 0; write 1, or a temperature above 0"
        )
    return None


def _length_buffers_fit(spec: JobFields, rewards: Sequence[RewardSettings]) -> str | None:
    longest = spec.sampling.max_response_tokens
    for reward in rewards:
        if reward.length is not None and reward.length.buffer_tokens >= longest:
            return (
                f"length.bufferTokens {reward.length.buffer_tokens} of reward {reward.name} is not less than"
                f" sampling.maxResponseTokens {longest}; lower the first or raise the second"
            )
    return None


def _money_is_counted(spec: JobFields) -> str | None:
    if spec.budget is not None and spec.budget.money is not None and not spec.prices.given:
        return "no instance has a price, so this limit would never apply; add spec.prices, or write budget.gpuHours"
    return None


def of_algorithm(section: str, field: str, attribute: str) -> str:
    """Return the CEL for a choice of the algorithm: the job's value, or the default of the algorithm's name."""
    meant = {name: getattr(AlgorithmSettings(name=name).resolved(), attribute) for name in get_args(AlgorithmName)}
    table = ", ".join(f"'{name}': {value!r}" for name, value in meant.items())
    return f"(has({section}.{field}) ? {section}.{field} : {{{table}}}[{section}.name])"


_ROUNDS = of_algorithm("self.algorithm", "dynamicSamplingRounds", "dynamic_sampling_rounds")

_WHAT_PRICES_READ = ("prices", "pods", "generation", "preparation.pods", "learning", "rehearsal")

SPEC_RULES = (
    Rule(
        "steps",
        ("steps", "epochs"),
        _one_length,
        CelRule("has(self.steps) != has(self.epochs)", "exactly one of steps and epochs must be set"),
    ),
    Rule(
        "rewards",
        ("rewards",),
        lambda spec: _names_differ(spec.rewards),
        CelRule(
            "self.rewards.all(r, self.rewards.exists_one(other, other.name == r.name))",
            "each reward needs its own name",
        ),
    ),
    Rule(
        "batch.samplesPerPrompt",
        ("batch.samplesPerPrompt", "algorithm"),
        _group_is_larger_than_one,
        CelRule(
            "self.batch.samplesPerPrompt > 1 ||"
            f" !({of_algorithm('self.algorithm', 'advantage', 'advantage')} in ['group', 'leave_one_out'])"
            f" && {_ROUNDS} == 0",
            "batch.samplesPerPrompt must be 2 or more if the samples of a prompt are compared"
            " (advantage: group or leave_one_out, or dynamicSamplingRounds above 0)",
        ),
    ),
    *ASYNC_RULES,
    *ENVIRONMENT_RULES,
    Rule(
        "batch.samplesPerPrompt",
        ("batch.promptsPerStep", "batch.samplesPerPrompt"),
        _step_is_plannable,
        CelRule(
            f"self.batch.promptsPerStep * self.batch.samplesPerPrompt <= {_MOST_SAMPLES}",
            f"batch.promptsPerStep × batch.samplesPerPrompt must be at most {_MOST_SAMPLES}",
        ),
    ),
    Rule(
        "optimizer.name",
        ("optimizer.name", "learning.processes", "learning.instances"),
        _muon_has_whole_matrices,
        CelRule(
            "self.optimizer.name != 'muon' || (!has(self.learning.processes) || self.learning.processes == 1)"
            " && self.learning.instances.max == 1",
            "optimizer.name must be adamw if learning.processes or learning.instances.max is more than 1",
        ),
    ),
    Rule(
        "learning.instances",
        ("learning.instances", "rehearsal"),
        _learners_are_a_range,
        CelRule(
            "self.learning.instances.min <= self.learning.instances.max"
            " && (self.learning.instances.max == 1 || !has(self.rehearsal))",
            "learning.instances.min must be at most learning.instances.max, which must be 1 in a rehearsal",
        ),
    ),
    Rule(
        "generation.instances",
        ("generation.instances",),
        lambda spec: _is_a_range(spec.generation.instances.min, spec.generation.instances.max),
        CelRule(
            "!has(self.generation.instances.max) || self.generation.instances.min <= self.generation.instances.max",
            "generation.instances.min must be at most generation.instances.max",
        ),
    ),
    Rule(
        "preparation.instances",
        ("preparation.instances",),
        lambda spec: _is_a_range(spec.preparation.instances.min, spec.preparation.instances.max),
        CelRule(
            "!has(self.preparation.instances.max) || self.preparation.instances.min <= self.preparation.instances.max",
            "preparation.instances.min must be at most preparation.instances.max",
        ),
    ),
    Rule(
        "checkpoints.best",
        ("checkpoints.best", "evaluation"),
        _best_is_evaluated,
        CelRule("!self.checkpoints.best || has(self.evaluation)", "checkpoints.best needs evaluation"),
    ),
    Rule(
        "rewards",
        ("rewards", "sampling.maxResponseTokens"),
        lambda spec: _length_buffers_fit(spec, spec.rewards),
        CelRule(
            "self.rewards.all(r, !has(r.length) || r.length.bufferTokens < self.sampling.maxResponseTokens)",
            "length.bufferTokens of a reward must be less than sampling.maxResponseTokens",
        ),
    ),
    Rule(
        "evaluation.rewards",
        ("evaluation.rewards",),
        lambda spec: _names_differ(_rewards_of_evaluation(spec)),
        CelRule(
            "!has(self.evaluation) || !has(self.evaluation.rewards) || self.evaluation.rewards.all(r,"
            " self.evaluation.rewards.exists_one(other, other.name == r.name))",
            "each reward of evaluation.rewards needs its own name",
        ),
    ),
    Rule(
        "evaluation.rewards",
        ("evaluation.rewards", "sampling.maxResponseTokens"),
        lambda spec: _length_buffers_fit(spec, _rewards_of_evaluation(spec)),
        CelRule(
            "!has(self.evaluation) || !has(self.evaluation.rewards) || self.evaluation.rewards.all(r,"
            " !has(r.length) || r.length.bufferTokens < self.sampling.maxResponseTokens)",
            "length.bufferTokens of a reward of evaluation.rewards must be less than sampling.maxResponseTokens",
        ),
    ),
    Rule(
        "evaluation.samplesPerPrompt",
        ("evaluation.samplesPerPrompt", "evaluation.sampling"),
        _greedy_evaluation_samples_once,
        CelRule(
            "!has(self.evaluation) || !has(self.evaluation.sampling.temperature) ||"
            " self.evaluation.sampling.temperature > 0.0 || self.evaluation.samplesPerPrompt == 1",
            "evaluation.samplesPerPrompt must be 1 if evaluation.sampling.temperature is 0 (greedy)",
        ),
    ),
    Rule(
        "prices.accelerators",
        _WHAT_PRICES_READ,
        lambda spec: unknown_price(spec, "accelerators"),
        CelRule(None, "if accelerators have prices, each stage's nodeSelector must name one of them"),
    ),
    Rule(
        "prices.spot",
        _WHAT_PRICES_READ,
        lambda spec: unknown_price(spec, "spot"),
        CelRule(None, "if accelerators have prices, those of stages on spot nodes need a price in prices.spot"),
    ),
    Rule(
        "budget.money",
        ("budget", "prices"),
        _money_is_counted,
        CelRule(
            "!has(self.budget) || !has(self.budget.money) || self.prices.instanceHour.matches('[1-9]')"
            " || size(self.prices.accelerators) > 0 || size(self.prices.spot) > 0"
            " || has(self.prices.stages.generation) || has(self.prices.stages.preparation)"
            " || has(self.prices.stages.learning)",
            "budget.money needs a price in prices",
        ),
    ),
)
