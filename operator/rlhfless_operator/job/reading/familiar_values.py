"""Remedies for fields of TRL and verl whose values mean something else in rlhfless."""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from rlhfless_functions.settings import AlgorithmName
from rlhfless_operator.job.reading.familiar_names import normal, our_field

Spec = Mapping[str, Any]
"""A job's spec as the user wrote it, valid or not."""


def round_up(value: float) -> int:
    """Return the next whole number, with room for the last bits of a product such as 0.1 × 30."""
    return math.ceil(value - 1e-9)


def _warmup(rounded: Callable[[float], int]) -> Callable[[Any, Spec], str | None]:
    """Convert a share of all steps. TRL rounds it up, verl down."""

    def convert(value: Any, spec: Spec) -> str | None:
        if not _is_number(value) or not 0 <= value <= 1:
            return None
        steps = spec.get("steps")
        if not _is_number(steps):
            return (
                f"write spec.optimizer.warmupSteps: {value:g} × the number of steps; an epoch has (number of prompts) /"
                " batch.promptsPerStep steps"
            )
        return f"write spec.optimizer.warmupSteps: {rounded(value * steps)} ({value:g} × {steps} steps)"

    return convert


def _batch(value: Any, spec: Spec) -> str | None:
    """Return the remedy for TRL's batch: a step has samples of a device at a time × accumulation × processes."""
    size, accumulated = _found(spec, "per_device_train_batch_size"), _found(spec, "gradient_accumulation_steps")
    group = _found(spec, "samplesPerPrompt") or _found(spec, "num_generations") or 8
    size, accumulated = size or 8, accumulated or 1
    samples = size * accumulated
    per_process = f"{samples // group}" if samples % group == 0 else f"{samples} / {group}"
    return (
        f"in TRL a step has per_device_train_batch_size {size} × gradient_accumulation_steps {accumulated} × processes"
        f" samples, here promptsPerStep × samplesPerPrompt: write spec.batch.promptsPerStep: {per_process} × processes"
        f" with samplesPerPrompt: {group}; memory is bounded by spec.batch.microbatchTokens"
    )


_ESTIMATORS = {"gae": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_plus_plus"}


def _estimator(value: Any, spec: Spec) -> str | None:
    if value not in _ESTIMATORS:
        return None
    return f"write spec.algorithm: {{name: {_ESTIMATORS[value]}}}"


def _trainer(value: Any, spec: Spec) -> str | None:
    if isinstance(value, Mapping):
        names = [(str(name), our_field(str(name))) for name in value]
        known = ", ".join(f"{theirs} is {ours}" for theirs, ours in names if ours is not None)
        return f"remove the section{f': {known}' if known else ''}; rlhfless convert turns the whole file into a job"
    name = normal(str(value)).removesuffix("trainer")
    ours = next((one for one in get_args(AlgorithmName) if normal(one) == name), None)
    return None if ours is None else f"write spec.algorithm: {{name: {ours}}}"


SCALINGS = {True: "group", "group": "group", False: "none", "none": "none", "batch": "batch"}
"""Our `advantageNormalization` for TRL's `scale_rewards`."""


def _scaling(value: Any, spec: Spec) -> str | None:
    if not isinstance(value, bool | str):
        return None
    ours = SCALINGS.get(value)
    return None if ours is None else f"write spec.algorithm.advantageNormalization: {ours}"


def _precision(value: Any, spec: Spec) -> str | None:
    return "write spec.model.dtype: bfloat16" if value is True else None


def _tracker(value: Any, spec: Spec) -> str | None:
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    fields = {"wandb": "wandb: {project: NAME}", "tensorboard": "tensorboard: true"}
    wanted = [fields[name] for name in names if isinstance(name, str) and name in fields]
    return f"write spec.tracking: {{{', '.join(wanted)}}}" if wanted else None


def _critic_warmup(value: Any, spec: Spec) -> str | None:
    """Convert verl's step from which the policy learns into the number of steps before it."""
    if not _is_number(value) or value < 1:
        return None
    return f"write spec.algorithm.critic.warmupSteps: {value - 1:g} (in verl the policy learns from step {value:g} on)"


def _always(text: str) -> Callable[[Any, Spec], str | None]:
    return lambda value, spec: text


_LOGGED = _always("remove it: every step is in metrics.jsonl and in what spec.tracking names")
_SAMPLES = _always("remove it: responses are in samples.jsonl and in the report of each run")

_MEANINGS: dict[str, Callable[[Any, Spec], str | None]] = {
    "warmup_ratio": _warmup(round_up),
    "lr_warmup_ratio": _warmup(round_up),
    "lr_warmup_steps_ratio": _warmup(int),
    "per_device_train_batch_size": _batch,
    "gradient_accumulation_steps": _batch,
    "adv_estimator": _estimator,
    "advantage_estimator": _estimator,
    "critic_warmup": _critic_warmup,
    "trainer": _trainer,
    "algo": _trainer,
    "scale_rewards": _scaling,
    "bf16": _precision,
    "report_to": _tracker,
    "logger": _tracker,
    "logging_steps": _LOGGED,
    "logging_strategy": _LOGGED,
    "logging_first_step": _LOGGED,
    "log_completions": _SAMPLES,
    "num_completions_to_print": _SAMPLES,
    "log_val_generations": _SAMPLES,
}
_BY_NAME = {normal(theirs): meaning for theirs, meaning in _MEANINGS.items()}


def what_to_write(name: str, value: Any, spec: Spec) -> str | None:
    """Return the remedy for another framework's field `name`, and the value to write; None if our name is enough."""
    meaning = _BY_NAME.get(normal(name)) or _BY_NAME.get(normal(name.rpartition(".")[2]))
    return None if meaning is None else meaning(value, spec)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _found(spec: Spec, name: str) -> int | None:
    """Return the whole number with this name in the spec or one of its sections."""
    for section in (spec, *(part for part in spec.values() if isinstance(part, Mapping))):
        for theirs, value in section.items():
            if normal(str(theirs)) == normal(name) and isinstance(value, int) and value > 0:
                return value
    return None
