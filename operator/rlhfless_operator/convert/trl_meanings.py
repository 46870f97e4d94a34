"""Conversions of TRL's fields of GRPO that differ in more than the name. Each function belongs to a row of `trl.py`."""

import dataclasses
from pathlib import PurePosixPath
from typing import Any

from rlhfless_operator.convert.conversion import Left, Outcome, Theirs, Unneeded, Written, job_name, share
from rlhfless_operator.convert.datasets import entries_to, fields_of, is_file, source_of
from rlhfless_operator.convert.trl_environments import environment_reward
from rlhfless_operator.job.reading.familiar_values import round_up

# --- how large a step is ---


def _update_samples(theirs: Theirs) -> int:
    """Return the number of samples of an optimizer update."""
    return theirs.whole("per_device_train_batch_size") * theirs.whole("gradient_accumulation_steps") * theirs.processes


def _generated_samples(theirs: Theirs) -> int:
    """Return the number of samples that are generated at a time."""
    if theirs["generation_batch_size"] is not None:
        return theirs.whole("generation_batch_size")
    if theirs["steps_per_generation"] is not None:
        return theirs.whole("per_device_train_batch_size") * theirs.whole("steps_per_generation") * theirs.processes
    return _update_samples(theirs)


def _step_samples(theirs: Theirs) -> int:
    """Return the number of samples between generations with different weights: a step of a job."""
    generated, update = _generated_samples(theirs), _update_samples(theirs)
    if generated % update and update % generated:
        raise ValueError(f"an update of {update} samples and a generation of {generated} do not fit into each other")
    if generated < update and theirs.whole("num_iterations") > 1:
        raise ValueError("an update of several generations, each passed num_iterations times, is no step here")
    return max(generated, update)


def _updates(theirs: Theirs) -> int:
    """Optimizer updates of a step."""
    return _step_samples(theirs) // _update_samples(theirs) * theirs.whole("num_iterations")


def prompts(value: Any, theirs: Theirs) -> Outcome:
    samples, group = _step_samples(theirs), theirs.whole("num_generations")
    prompts = share(samples, group, "samples of a generation, in groups of num_generations")
    parts = f"{value} × {theirs.whole('gradient_accumulation_steps')} accumulated × {theirs.processes} of processes"
    if _generated_samples(theirs) != _update_samples(theirs):
        parts = "the generation's"
    values = {"spec.batch.promptsPerStep": prompts}
    if not theirs.processes_known and theirs["generation_batch_size"] is None:
        return Left("how many processes it runs with is not known, 1 is counted: convert with --processes", values)
    return Written(
        values,
        f"{samples} samples a step ({parts}) / {group} of a prompt; memory is bounded by batch.microbatchTokens",
    )


def minibatch(value: Any, theirs: Theirs) -> Outcome:
    samples, update = _step_samples(theirs), _update_samples(theirs)
    if samples == update:
        return Unneeded("part of batch.promptsPerStep: a step is one update")
    return Written({"spec.batch.minibatchSamples": update}, f"{share(samples, update, 'samples')} updates a step")


def generation_size(value: Any, theirs: Theirs) -> Outcome:
    return None if value is None else Unneeded("part of batch.promptsPerStep and batch.minibatchSamples")


def max_steps(value: Any, theirs: Theirs) -> Outcome:
    updates, steps = _updates(theirs), theirs.whole("max_steps")
    if steps <= 0:
        return None
    note = f"{steps} updates, {updates} a step" if updates > 1 else ""
    return Written({"spec.steps": round_up(steps / updates)}, note)


def epochs(value: Any, theirs: Theirs) -> Outcome:
    if theirs.whole("max_steps") > 0:
        return None
    epochs = theirs.number("num_train_epochs")
    if epochs == int(epochs):
        return Written({"spec.epochs": int(epochs)})
    return Left(f"{epochs:g} passes are no whole number; write steps instead", {"spec.epochs": round_up(epochs)})


def warmup(value: Any, theirs: Theirs) -> Outcome:
    amount = 0.0 if value is None else theirs.number("warmup_steps")
    ratio = 0.0 if theirs["warmup_ratio"] is None else theirs.number("warmup_ratio")
    if 0 < amount < 1:
        amount, ratio = 0.0, amount
    if not amount and not ratio:
        return Written({"spec.optimizer.warmupSteps": 0})
    if theirs["lr_scheduler_type"] == "constant":
        return Unneeded("TRL's constant schedule has no warm-up; constant_with_warmup would")
    updates, steps = _updates(theirs), theirs.whole("max_steps")
    if ratio and not amount:
        if steps <= 0:
            return Left(
                f"{ratio:g} of the steps: write optimizer.warmupSteps once you know them; an epoch has as many as"
                " there are prompts / batch.promptsPerStep"
            )
        amount = round_up(ratio * steps)
        note = f"{ratio:g} × {round_up(steps / updates)} steps"
    else:
        note = f"{amount:g} updates, {updates} a step" if updates > 1 else ""
    return Written({"spec.optimizer.warmupSteps": round_up(amount / updates)}, note)


def checkpoints(value: Any, theirs: Theirs) -> Outcome:
    if value is None:
        return None
    if float(value) < 1:
        return Left("a share of all steps; write how many steps")
    return Written({"spec.checkpoints.everySteps": max(1, round(float(value) / _updates(theirs)))})


# --- model ---


def dtype(value: Any, theirs: Theirs) -> Outcome:
    inner = (theirs["model_init_kwargs"] or {}) if isinstance(theirs["model_init_kwargs"], dict) else {}
    value = str(inner.get("dtype", inner.get("torch_dtype", theirs["torch_dtype"] or value))).removeprefix("torch.")
    if value in ("float32", "bfloat16"):
        return Written({"spec.model.dtype": value})
    return Left(f"weights are float32 or bfloat16, not {value}", {"spec.model.dtype": "bfloat16"})


def bf16(value: Any, theirs: Theirs) -> Outcome:
    """Convert the number format: TRL computes in bfloat16 by default."""
    return Written({"spec.learning.autocast": bool(value) if value is not None else not theirs["fp16"]})


def lora(ours: str, kind: Any) -> Any:
    def convert(value: Any, theirs: Theirs) -> Outcome:
        return Written({f"spec.model.lora.{ours}": kind(value)}) if theirs["use_peft"] else None

    return convert


def lora_targets(value: Any, theirs: Theirs) -> Outcome:
    if not theirs["use_peft"]:
        return None
    if value is None:
        note = "peft's choice for Llama, Qwen, Mistral and Gemma; of others look it up"
        return Written({"spec.model.lora.targetModules": ["q_proj", "v_proj"]}, note)
    return Written({"spec.model.lora.targetModules": [value] if isinstance(value, str) else list(value)})


# --- rewards and data ---


def rewards(value: Any, theirs: Theirs) -> Outcome:
    functions = [value] if isinstance(value, str) else list(value or [])
    terms: list[dict[str, Any]] = []
    notes: list[str] = []
    if theirs["reward_model_name_or_path"]:
        terms.append({"name": "model", "model": {"source": theirs["reward_model_name_or_path"]}})
    for function in functions:
        term, note = _reward(str(function), theirs)
        terms.append(term)
        notes += [note] if note else []
    weights = theirs["reward_weights"] or [1.0] * len(terms)
    if len(weights) != len(terms):
        raise ValueError(f"reward_weights has {len(weights)} numbers for {len(terms)} rewards")
    for number_, (term, weight) in enumerate(zip(terms, weights, strict=True)):
        names = [other["name"] for other in terms[:number_]]
        term["name"] = term["name"] if term["name"] not in names else f"{term['name']}-{number_}"
        term |= {"weight": float(weight)} if float(weight) != 1 else {}
    own, note = environment_reward(theirs)
    terms += own
    notes += [note] if note else []
    if not terms:
        placeholder = {"name": "reward", "python": {"file": "reward.py", "function": "reward"}}
        return Left(
            "its script has the reward functions: put yours into reward.py, or name others",
            {"spec.rewards": [placeholder]},
        )
    values: dict[str, Any] = {"spec.rewards": terms}
    if _wants_solution(theirs):
        values["spec.data.groundTruthColumn"] = "solution"
    return Left("; ".join(notes), values) if notes else Written(values)


def _wants_solution(theirs: Theirs) -> bool:
    functions = theirs["reward_funcs"]
    return bool({"accuracy_reward", "accuracy"} & set([functions] if isinstance(functions, str) else functions or []))


def _reward(function: str, theirs: Theirs) -> tuple[dict[str, Any], str]:
    """Return a reward term, and a message about it for the user."""
    if function == "accuracy_reward":
        return {"name": "accuracy", "math": {}}, ""
    if function == "think_format_reward":
        return {"name": "think-format", "format": {"pattern": "<think>(?!.*<think>)(.*?)</think>.*"}}, ""
    if function == "get_soft_overlong_punishment":
        longest = theirs.whole("max_completion_length")
        term = {"name": "length", "length": {"bufferTokens": min(256, longest - 1)}}
        moved = f"TRL's slope is from 1024 to 1280 tokens, here it ends at the longest response, {longest}"
        return term, "" if longest == 1280 else moved
    if function in _OPEN_R1:
        term, what = _OPEN_R1[function]
        return {
            "name": function.replace("_", "-"),
            **term,
        }, f"{function} is a name of its script; as in open-r1 it is {what}"
    module, dot, name = function.rpartition(".")
    note = ""
    if not dot and function in _OF_TRL:
        module, name = "trl_rewards", function
        note = f"{function} is TRL's own: write `from trl.rewards import {function}` into trl_rewards.py"
    elif not dot:
        module, name = "rewards", function
        note = f"its script has {function}: put that function into rewards.py"
    elif module == theirs.name:
        note = f"{name} is in the script itself: move it into a file that trains nothing when it is imported"
    file = f"{module.replace('.', '/')}.py"
    return {"name": job_name(name), "python": {"file": file, "function": name, "style": "trl"}}, note


_OF_TRL = ("reasoning_accuracy_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward")
"""Rewards of TRL that are no kinds of their own here."""

_OPEN_R1: dict[str, tuple[dict[str, Any], str]] = {
    "accuracy": ({"math": {}}, "the mathematical equality with the column solution"),
    "format": (
        {"format": {"pattern": "<think>\\n.*?\\n</think>\\n<answer>\\n.*?\\n</answer>"}},
        "thoughts and an answer in tags",
    ),
}
"""Names of open-r1's registry of rewards, our term, and a word for it."""


MIXTURES = ("datasets", "dataset_mixture")
"""Fields with several datasets, which come before the name of one: TRL's and open-r1's."""


def dataset(value: Any, theirs: Theirs) -> Outcome:
    """Convert the data: a name, or a mixture."""
    entries = _mixture(theirs)
    if entries is not None:
        outcome = entries_to("spec.data", entries)
        mixture = theirs["dataset_mixture"]
        if not isinstance(mixture, dict) or mixture.get("test_split_size") is None:
            return outcome
        reasons = [outcome.reason] if isinstance(outcome, Left) else []
        held = "test_split_size: write the rows that are held out into a file of their own"
        return Left("; ".join([*reasons, held]), outcome.values)
    if value is None:
        return Left("no dataset is named: write the file of your prompts", {"spec.data.source": "train.jsonl"})
    source = source_of(value, theirs["dataset_config"], theirs["dataset_train_split"])
    return Written(fields_of("spec.data", [source]), "relative to the job file" if is_file(str(value)) else "")


def _mixture(theirs: Theirs) -> list[Any] | None:
    """Return the entries of a mixture, if there is one."""
    mixture = theirs["datasets"] or theirs["dataset_mixture"]
    entries = mixture.get("datasets") if isinstance(mixture, dict) else mixture
    return list(entries) if entries else None


def longest_prompt(value: Any, theirs: Theirs) -> Outcome:
    if value is not None:
        return Written({"spec.sampling.maxPromptTokens": int(value)}, "longer prompts are dropped and counted, not cut")
    sequence = theirs["vllm_max_model_length"]
    longest = 1024 if sequence is None else int(sequence) - theirs.whole("max_completion_length")
    values = {"spec.sampling.maxPromptTokens": longest, "spec.data.longPrompts": "fail"}
    return Written(values, "TRL takes prompts of any length; here a longer one is an error")


def evaluation(value: Any, theirs: Theirs) -> Outcome:
    """Convert the evaluation, on another split of the data or on data of its own."""
    if value in ("no", False, None):
        return None
    name, own = theirs["dataset_name"], theirs["eval_dataset"]
    if own is None and (name is None or is_file(str(name)) or _mixture(theirs) is not None):
        return Left("write evaluation: {data: {source: FILE}} with prompts that are not trained on")
    outcome = entries_to(
        "spec.evaluation.data",
        own or [{"path": name, "name": theirs["dataset_config"], "split": theirs["dataset_test_split"]}],
    )
    more: dict[str, Any] = {
        "longPrompts": "fail" if theirs["max_prompt_length"] is None else "drop",
        "promptColumn": theirs["dataset_prompt_column"],
        "systemPrompt": theirs["system_prompt"],
        "chatTemplateKwargs": theirs["chat_template_kwargs"],
        "groundTruthColumn": "solution" if _wants_solution(theirs) else None,
    }
    values = {f"spec.evaluation.data.{field}": each for field, each in more.items() if each is not None}
    values["spec.evaluation.samplesPerPrompt"] = theirs["num_generations_eval"] or theirs["num_generations"]
    if value == "steps" and theirs["eval_steps"]:
        every = max(1, round(float(theirs["eval_steps"]) / _updates(theirs)))
        values["spec.evaluation.everySteps"] = every
    return dataclasses.replace(outcome, values={**outcome.values, **values})


# --- the job ---


def name(value: Any, theirs: Theirs) -> Outcome:
    folder = theirs["output_dir"] and PurePosixPath(str(theirs["output_dir"])).name
    return Written({"metadata.name": job_name(str(value or folder or theirs.name))})


def output(value: Any, theirs: Theirs) -> Outcome:
    if value is None:
        return None
    parent = str(PurePosixPath(str(value)).parent)
    return Written({"spec.artifacts.uri": "runs" if parent == "." else parent}, "the job's name is its folder there")


def continuous(value: Any, theirs: Theirs) -> Outcome:
    return Written({"spec.generation.engine": "vllm"}) if value else None


SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def final_ratio(value: Any, theirs: Theirs) -> Outcome:
    if theirs["lr_scheduler_type"] != "cosine_with_min_lr":
        return None if value is None else Left("write what of it you need")
    given = value if isinstance(value, dict) else {}
    ratio = given.get("min_lr_rate", float(given.get("min_lr", 0)) / theirs.number("learning_rate"))
    return Written({"spec.optimizer.finalRatio": float(ratio)})
