"""Conversions of verl's fields that differ in more than the name. Each function belongs to a row of `verl.py`."""

from collections.abc import Callable
from typing import Any

from rlhfless_operator.convert.conversion import Left, Outcome, Theirs, Unneeded, Written, one_of, trackers
from rlhfless_operator.convert.datasets import fields_of, files_of, source_of
from rlhfless_operator.convert.verl_algorithm import ACTOR
from rlhfless_operator.job.reading.familiar_values import round_up

ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("rollout", "model"))
OPTIMIZER = f"{ACTOR}.optim"

SCHEDULES = tuple(f"{OPTIMIZER}.{name}" for name in ("warmup_style", "lr_decay_style"))
"""Other names of the schedule: older, and Megatron's."""

LOWEST = tuple(f"{OPTIMIZER}.{name}" for name in ("min_lr", "lr_min"))
"""The lowest learning rate as Megatron's and VeOmni's trainers have it."""

CRITIC = {
    "model.path": (f"{MODEL}.path", "model"),
    "model.lora_rank": (f"{MODEL}.lora_rank", "adapters"),
    "ppo_mini_batch_size": (f"{ACTOR}.ppo_mini_batch_size", "minibatches"),
    "ppo_epochs": (f"{ACTOR}.ppo_epochs", "passes"),
    "loss_agg_mode": (f"{ACTOR}.loss_agg_mode", "mean"),
    "loss_scale_factor": (f"{ACTOR}.loss_scale_factor", "mean"),
    "grad_clip": (f"{ACTOR}.grad_clip", "bound of gradients"),
    **{
        f"optim.{name}": (f"{OPTIMIZER}.{name}", "optimizer and schedule")
        for name in (
            "optimizer", "name", "eps", "betas", "weight_decay", "clip_grad", "lr_warmup_steps",
            "lr_warmup_steps_ratio", "min_lr_ratio", "min_lr", "lr_min", "lr_scheduler_type", "lr_decay_style",
            "warmup_style",
        )
    },
}  # fmt: skip
"""Fields of the critic, the field of the actor whose value they have here, and a word for it."""

# --- rewards and data ---


REWARDS = ("custom_reward_function.path", "reward.reward_model.enable", "reward_model.enable")
"""Other fields that may name verl's reward."""


def rewards(value: Any, theirs: Theirs) -> Outcome:
    """Convert all reward terms: the user's function or model, and the over-long punishment."""
    terms: list[dict[str, Any]] = []
    left = ""
    file = theirs["reward.custom_reward_function.path"] or theirs["custom_reward_function.path"]
    enabled = theirs["reward.reward_model.enable"] or theirs["reward_model.enable"]
    if file:
        own, old = theirs["reward.custom_reward_function.name"], theirs["custom_reward_function.name"]
        function = {"file": str(file), "function": old or own, "style": "verl"}
        terms.append({"name": "score", "python": function})
    elif enabled:
        source = theirs["reward.reward_model.model_path"] or theirs["reward_model.model.path"]
        terms.append({"name": "model", "model": {"source": str(source)}})
    else:
        terms.append({"name": "score", "python": {"file": "reward.py", "function": "compute_score", "style": "verl"}})
        left = (
            "verl chooses its scorer by the column data_source: write `from verl.utils.reward_score import"
            " default_compute_score as compute_score` into reward.py, or name a reward such as math: {}"
        )
    buffer, differs = _overlong(theirs)
    if buffer is not None:
        terms.append(buffer)
        left = "; ".join(each for each in (left, differs) if each)
    return Left(left, {"spec.rewards": terms}) if left else Written({"spec.rewards": terms})


OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
    "reward.overlong_buffer",
)
"""Sections of the over-long punishment, in the order in which they count."""

LONGEST = tuple(f"{place}.reward_kwargs.max_resp_len" for place in ("reward", "reward_model"))
"""Names of the length at which the punishment ends."""


def _overlong(theirs: Theirs) -> tuple[dict[str, Any] | None, str]:
    """Return the term of the over-long punishment, if there is one, and what differs in it."""
    place = next((place for place in OVERLONG if theirs[f"{place}.enable"]), None)
    if place is None:
        return None, ""
    term: dict[str, Any] = {"name": "length", "length": {"bufferTokens": theirs.whole(f"{place}.len")}}
    factor = theirs.number(f"{place}.penalty_factor")
    managers = {theirs["reward.reward_manager.name"], theirs["reward_model.reward_manager"]}
    longest = next((theirs[name] for name in LONGEST if theirs[name] is not None), None)
    notes = []
    if "dapo" not in managers:
        notes.append("verl punishes long responses with the reward manager dapo only: remove the length term otherwise")
    if longest is not None and float(longest) != theirs.number("data.max_response_length"):
        notes.append(f"verl's slope ends at {longest} tokens, here at the longest response")
    return term | ({"weight": factor} if factor != 1 else {}), "; ".join(notes)


def files(value: Any, theirs: Theirs) -> Outcome:
    if not value:
        return Left("no dataset is named: write the file of your prompts", {"spec.data.source": "train.parquet"})
    return Written(fields_of("spec.data", [source_of(name) for name in files_of(value)]))


def evaluation(value: Any, theirs: Theirs) -> Outcome:
    """Convert the evaluation with its sampling, which takes the likeliest tokens by default."""
    if not value:
        return None
    kwargs = f"{ROLLOUT}.val_kwargs"
    temperature, samples = theirs.number(f"{kwargs}.temperature"), theirs.whole(f"{kwargs}.n")
    values: dict[str, Any] = {
        **fields_of("spec.evaluation.data", [source_of(name) for name in files_of(value)]),
        "spec.evaluation.data.promptColumn": str(theirs["data.prompt_key"]),
        "spec.evaluation.data.longPrompts": "drop" if theirs["data.filter_overlong_prompts"] else "fail",
        "spec.evaluation.samplesPerPrompt": samples if temperature else 1,
        "spec.evaluation.sampling.temperature": temperature,
    }
    if theirs.whole("trainer.test_freq") > 0:
        values["spec.evaluation.everySteps"] = theirs.whole("trainer.test_freq")
    if temperature and not theirs[f"{kwargs}.do_sample"]:
        older = f"older releases of verl take the likeliest tokens without do_sample; {temperature:g} is written"
        return Left(older, values)
    note = "verl takes the likeliest tokens" if not temperature else ""
    return Written(values, f"{note}, {samples} times the same" if note and samples > 1 else note)


def long_prompts(value: Any, theirs: Theirs) -> Outcome:
    if theirs["data.filter_overlong_prompts"]:
        return Written({"spec.data.longPrompts": "drop"})
    if value == "error":
        return Written({"spec.data.longPrompts": "fail"})
    return Left(f"prompts are never cut ({value}); longer ones are dropped instead", {"spec.data.longPrompts": "drop"})


# --- batch and optimizer ---


def minibatch(value: Any, theirs: Theirs) -> Outcome:
    prompts, group = theirs.whole("data.train_batch_size"), theirs.whole(f"{ROLLOUT}.n")
    size = theirs.whole(f"{ACTOR}.ppo_mini_batch_size")
    if size >= prompts:
        return None
    if prompts % size:
        return Left(f"{size} prompts do not divide the {prompts} of a step; a step is one update instead")
    note = f"{size} prompts × {group}: {prompts // size} updates a step"
    return Written({"spec.batch.minibatchSamples": size * group}, note)


def microbatch(value: Any, theirs: Theirs) -> Outcome:
    if theirs[f"{ACTOR}.use_dynamic_bsz"]:
        return Written({"spec.batch.microbatchTokens": theirs.whole(f"{ACTOR}.ppo_max_token_len_per_gpu")})
    if value is None:
        return None
    longest = theirs.whole("data.max_prompt_length") + theirs.whole("data.max_response_length")
    note = f"{value} × ({longest} tokens, prompt and response)"
    return Written({"spec.batch.microbatchTokens": int(value) * longest}, note)


def warmup(value: Any, theirs: Theirs) -> Outcome:
    steps = theirs.whole(f"{OPTIMIZER}.lr_warmup_steps")
    if steps > 0:
        return Written({"spec.optimizer.warmupSteps": steps})
    ratio, total = theirs.number(f"{OPTIMIZER}.lr_warmup_steps_ratio"), theirs["trainer.total_training_steps"]
    if not ratio:
        return Written({"spec.optimizer.warmupSteps": 0})
    if total is None:
        return Left(
            f"{ratio:g} of the steps: write optimizer.warmupSteps once you know them; an epoch has as many as there"
            " are prompts / batch.promptsPerStep"
        )
    return Written({"spec.optimizer.warmupSteps": int(ratio * int(total))}, f"{ratio:g} × {total} steps, rounded down")


def schedule(value: Any, theirs: Theirs) -> Outcome:
    chosen = theirs[f"{OPTIMIZER}.warmup_style"] or theirs[f"{OPTIMIZER}.lr_decay_style"] or value
    return one_of(
        "optimizer.schedule",
        {"constant": "constant", "cosine": "cosine", "linear": "linear"},
        "schedules are constant, linear and cosine",
        "constant",
    )(chosen, theirs)


def final_ratio(value: Any, theirs: Theirs) -> Outcome:
    """Convert the lowest learning rate, of which FSDP's trainer has the share, and others the rate itself."""
    lowest = theirs[f"{OPTIMIZER}.min_lr"] or theirs[f"{OPTIMIZER}.lr_min"]
    if lowest:
        ratio = float(lowest) / theirs.number(f"{OPTIMIZER}.lr")
        return Written({"spec.optimizer.finalRatio": ratio}, f"{float(lowest):g} / the learning rate")
    return None if value is None else Written({"spec.optimizer.finalRatio": float(value)})


def weight_decay(value: Any, theirs: Theirs) -> Outcome:
    note = "verl applies it to norms and biases, too" if float(value) else ""
    return Written({"spec.optimizer.weightDecay": float(value)}, note)


def betas(value: Any, theirs: Theirs) -> Outcome:
    beta1, beta2 = value
    return Written({"spec.optimizer.beta1": float(beta1), "spec.optimizer.beta2": float(beta2)})


# --- model and run ---


def lora(value: Any, theirs: Theirs) -> Outcome:
    rank, megatron = theirs.whole(f"{MODEL}.lora_rank"), theirs.whole(f"{MODEL}.lora.rank")
    if not rank and not megatron:
        return None
    place = "lora_alpha" if rank else "lora.alpha"
    values: dict[str, Any] = {"rank": rank or megatron, "alpha": theirs.number(f"{MODEL}.{place}")}
    targets = theirs[f"{MODEL}.target_modules" if rank else f"{MODEL}.lora.target_modules"]
    values["targetModules"] = [targets] if isinstance(targets, str) else list(targets)
    if not rank:
        values["dropout"] = theirs.number(f"{MODEL}.lora.dropout")
        values["targetModules"] = ["all-linear"]
    return Written(
        {f"spec.model.lora.{name}": each for name, each in values.items()},
        "Megatron's names of layers are not those of the model's folder: all linear layers are written"
        if not rank
        else "",
    )


def autocast(value: Any, theirs: Theirs) -> Outcome:
    names = {"bfloat16": True, "bf16": True, "float32": False, "fp32": False}
    if value in names:
        return Written({"spec.learning.autocast": names[value]})
    return Left(f"there is no {value}; bfloat16 is written instead", {"spec.learning.autocast": True})


def as_actor(actor: str, ours: str) -> Callable[[Any, Theirs], Outcome]:
    """Convert a field of the critic, which has the policy's value here."""

    def convert(value: Any, theirs: Theirs) -> Outcome:
        if theirs["algorithm.adv_estimator"] != "gae" or value is None or value == theirs[actor]:
            return None
        return Left(f"the critic has the policy's {ours}, {theirs[actor]}")

    return convert


def template_arguments(value: Any, theirs: Theirs) -> Outcome:
    """Convert the arguments of the chat template, such as the switch of thinking."""
    section = "data.apply_chat_template_kwargs."
    found: dict[str, Any] = {}
    for name in theirs.given:
        if name.startswith(section):
            *parents, last = name.removeprefix(section).split(".")
            place = found
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = theirs[name]
    if not found:
        return None
    values = {"spec.data.chatTemplateKwargs": found}
    return Written(values | ({"spec.evaluation.data.chatTemplateKwargs": found} if theirs["data.val_files"] else {}))


def engine(value: Any, theirs: Theirs) -> Outcome:
    names = {"vllm": "vllm", "hf": "transformers"}
    if value is None:
        return None
    if value not in names:
        return Left(f"{value} is no engine here; vLLM generates where it is installed", {})
    return Written({"spec.generation.engine": names[value]})


def length(value: Any, theirs: Theirs) -> Outcome:
    steps = theirs["trainer.total_training_steps"]
    return Written({"spec.steps": int(steps)} if steps is not None else {"spec.epochs": round_up(float(value))})


def logger(value: Any, theirs: Theirs) -> Outcome:
    if "trainer.logger" not in theirs.given:
        return None
    return trackers(value, str(theirs["trainer.project_name"]), "console", "file")


def checkpoints(value: Any, theirs: Theirs) -> Outcome:
    return Written({"spec.checkpoints.everySteps": int(value)}) if value is not None and int(value) > 0 else None


def critic_warmup(value: Any, theirs: Theirs) -> Outcome:
    if theirs["algorithm.adv_estimator"] != "gae":
        return None
    # verl's actor learns from step N on: `critic_warmup <= global_steps`, which begin at 1.
    steps = int(value or 0) - 1
    return Unneeded("no warm-up") if steps < 1 else Written({"spec.algorithm.critic.warmupSteps": steps})
