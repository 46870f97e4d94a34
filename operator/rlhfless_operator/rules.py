"""The rules of a job that span several fields, each written once for Python and once for the API server (CEL)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhfless_operator.spec import RLHFJobSpec


@dataclass(frozen=True)
class Violation:
    """A rule that a job breaks. Paths are in camelCase and start below `spec`."""

    field: str
    """Where it is reported."""
    reads: tuple[str, ...]
    """The fields that the rule looked at."""
    message: str


@dataclass(frozen=True)
class Rule:
    """One rule over the fields of a job's spec."""

    field: str
    """Path of the field that the rule is about, in camelCase below `spec`."""
    reads: tuple[str, ...]
    """Paths of all fields that it reads."""
    check: "Callable[[RLHFJobSpec], str | None]"
    """What is wrong and the remedy; None if the rule holds."""


def _one_length(spec: "RLHFJobSpec") -> str | None:
    if spec.steps is not None and spec.epochs is not None:
        return "steps and epochs are both given; remove one"
    if spec.steps is None and spec.epochs is None:
        return "missing; say how long to train, with steps or epochs"
    return None


def _reward_names_differ(spec: "RLHFJobSpec") -> str | None:
    names = [reward.name for reward in spec.rewards]
    repeated = sorted({name for name in names if names.count(name) > 1})
    return f"the name {repeated[0]} is given to several rewards; give each its own" if repeated else None


def _group_is_larger_than_one(spec: "RLHFJobSpec") -> str | None:
    advantage = spec.algorithm.resolved().advantage
    if advantage in ("group", "leave_one_out") and spec.batch.samples_per_prompt < 2:
        return f"{spec.algorithm.name} compares the samples of a prompt (advantage: {advantage}); write 2 or more"
    return None


def _instances_are_a_range(spec: "RLHFJobSpec") -> str | None:
    instances = spec.generation.instances
    if instances.min > instances.max:
        return f"min {instances.min} is more than max {instances.max}; raise max or lower min"
    return None


def _best_is_evaluated(spec: "RLHFJobSpec") -> str | None:
    if spec.checkpoints.best and spec.evaluation is None:
        return "the best weights are those with the best evaluation; add spec.evaluation, or remove this"
    return None


def _length_buffer_fits(spec: "RLHFJobSpec") -> str | None:
    longest = spec.sampling.max_response_tokens
    for reward in spec.rewards:
        if reward.length is not None and reward.length.buffer_tokens >= longest:
            return (
                f"length.bufferTokens {reward.length.buffer_tokens} of reward {reward.name} must be less than"
                f" sampling.maxResponseTokens {longest}"
            )
    return None


SPEC_RULES = (
    Rule("steps", ("steps", "epochs"), _one_length),
    Rule("rewards", ("rewards",), _reward_names_differ),
    Rule("batch.samplesPerPrompt", ("batch.samplesPerPrompt", "algorithm"), _group_is_larger_than_one),
    Rule("generation.instances", ("generation.instances",), _instances_are_a_range),
    Rule("checkpoints.best", ("checkpoints.best", "evaluation"), _best_is_evaluated),
    Rule("rewards", ("rewards", "sampling.maxResponseTokens"), _length_buffer_fits),
)
