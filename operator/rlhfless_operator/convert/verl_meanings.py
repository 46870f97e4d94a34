"""Conversions of verl's fields that differ in more than the name. Each function belongs to a row of `verl.py`."""

from collections.abc import Callable
from typing import Any

from rlhfless_operator.convert.conversion import Left, Outcome, Theirs, Unneeded, Written, one_of, to, trackers
from rlhfless_operator.job.reading.familiar_names import our_choice
from rlhfless_operator.job.reading.familiar_values import round_up

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
OPTIMIZER = f"{ACTOR}.optim"

# --- algorithm ---


_ESTIMATORS = {
    "gae": ("ppo", "gae"),
    "grpo": ("grpo", "group"),
    "grpo_vectorized": ("grpo", "group"),
    "rloo": ("grpo", "leave_one_out"),
    "rloo_vectorized": ("grpo", "leave_one_out"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "discounted"),
}
"""Our name of the algorithm, all of whose other defaults are overridden, and our advantage."""


def advantage(value: Any, theirs: Theirs) -> Outcome:
    if value not in _ESTIMATORS:
        return Left(
            f"{value} is no advantage here; the group's mean is written instead",
            {"spec.algorithm.name": "grpo", "spec.algorithm.advantage": "group"},
        )
    name, advantage = _ESTIMATORS[value]
    normalization = {"gae": "batch", "discounted": "batch", "leave_one_out": "none"}.get(
        advantage, "group" if theirs["algorithm.norm_adv_by_std_in_grpo"] else "none"
    )
    return Written(
        {
            "spec.algorithm.name": name,
            "spec.algorithm.advantage": advantage,
            "spec.algorithm.advantageNormalization": normalization,
        }
    )


def of_gae(ours: str) -> Callable[[Any, Theirs], Outcome]:
    """Convert a field that only matters with a critic."""

    def convert(value: Any, theirs: Theirs) -> Outcome:
        if theirs["algorithm.adv_estimator"] != "gae" or value is None:
            return None
        return to(ours)(value, theirs)

    return convert


def gamma(value: Any, theirs: Theirs) -> Outcome:
    if theirs["algorithm.adv_estimator"] not in ("gae", "reinforce_plus_plus"):
        return None
    return Written({"spec.algorithm.gamma": float(value)})


def loss_mode(value: Any, theirs: Theirs) -> Outcome:
    modes = {"vanilla": ("token", "ppo"), "gspo": ("sequence", "ppo"), "cispo": ("token", "cispo")}
    level, clip = modes.get(value, modes["vanilla"])
    values = {"spec.algorithm.ratioLevel": level, "spec.algorithm.clip": clip}
    return Written(values) if value in modes else Left(f"{value} is no loss here; PPO's clipping is written", values)


def clip(field: str, ours: str) -> Callable[[Any, Theirs], Outcome]:
    """Convert one side's bound. verl uses clip_ratio for it only if that side's own field is null."""

    def convert(value: Any, theirs: Theirs) -> Outcome:
        name = f"{ACTOR}.{field}"
        inherited = value is None or (name not in theirs.given and f"{ACTOR}.clip_ratio" in theirs.given)
        note = f"verl reads clip_ratio only where {field} is null; its default is 0.2"
        if inherited and value is not None:
            return Written({f"spec.algorithm.{ours}": float(value)}, note)
        return Written({f"spec.algorithm.{ours}": theirs.number(f"{ACTOR}.clip_ratio") if inherited else float(value)})

    return convert


def dual_clip(value: Any, theirs: Theirs) -> Outcome:
    if value is None or theirs[f"{ACTOR}.policy_loss.loss_mode"] != "vanilla":
        return None
    return Written({"spec.algorithm.dualClip": float(value)})


def aggregation(value: Any, theirs: Theirs) -> Outcome:
    if value in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        return Written({"spec.algorithm.aggregation": value})
    summed = our_choice(str(value), ("seq-mean-token-sum-norm",))
    instead = summed or "token-mean"
    divided = " (its gradient is divided by the longest response as well)" if summed else ""
    return Left(f"{value} is not there; {instead} is written instead{divided}", {"spec.algorithm.aggregation": instead})


def kl(value: Any, theirs: Theirs) -> Outcome:
    """Convert verl's two placements of the penalty. Both at once are left to the user."""
    in_loss, in_reward = theirs[f"{ACTOR}.use_kl_loss"], theirs["algorithm.use_kl_in_reward"]
    if not in_loss and not in_reward:
        return Written({"spec.algorithm.kl.coefficient": 0.0})
    kind = str(theirs[f"{ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty"])
    coefficient = theirs.number(f"{ACTOR}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef")
    estimator = our_choice(kind.removesuffix("+"), ("k1", "k2", "k3"))
    allowed = estimator is not None and in_loss != (estimator == "k1")
    values: dict[str, Any] = {
        "spec.algorithm.kl.coefficient": coefficient,
        "spec.algorithm.kl.placement": "loss" if in_loss else "reward",
        "spec.algorithm.kl.estimator": estimator if allowed else "k2" if in_loss else "k1",
    }
    if in_loss and in_reward:
        return Left("the penalty is in the loss or in the reward; it is written into the loss", values)
    if not allowed:
        why = "has a gradient of mean zero in the loss" if in_loss else "has another gradient than the KL in the reward"
        why = why if estimator is not None else "is no estimator here"
        return Left(f"{kind} {why}; {values['spec.algorithm.kl.estimator']} is written instead", values)
    return Written(values)


def rounds(value: Any, theirs: Theirs) -> Outcome:
    if not value:
        return Written({"spec.algorithm.dynamicSamplingRounds": 0})
    batches = theirs.whole("algorithm.filter_groups.max_num_gen_batches")
    rounds = min(16, batches - 1) if batches > 0 else 16
    note = f"{batches} generations at most, the first included" if batches > 0 else "verl has no bound; here it is 16"
    return Written({"spec.algorithm.dynamicSamplingRounds": rounds}, note)


def correction(value: Any, theirs: Theirs) -> Outcome:
    """Convert the correction: verl truncates at one bound, and masks outside two bounds, written as `low_high`."""
    if value is None:
        none = {"spec.algorithm.importanceSampling.mode": "none"}
        return Written(none, "verl corrects nothing unless it is told to")
    *low, high = str(theirs["algorithm.rollout_correction.rollout_is_threshold"]).split("_")
    settings: dict[str, Any] = {"mode": "mask" if low else "truncate", "level": "token", "high": float(high)}
    if low:
        settings["low"] = float(low[0])
    if value == "sequence":
        settings["level"] = "sequence_product"
    written = {f"spec.algorithm.importanceSampling.{name}": each for name, each in settings.items()}
    if value not in ("token", "sequence"):
        return Left(f"{value} is no level; tokens are corrected by themselves", written)
    return Written(written)


def rejection(value: Any, theirs: Theirs) -> Outcome:
    """Convert the bounds of the inverse ratio: `low_high`, or `high` with 1 / high as the lower bound."""
    if value is None:
        return None
    levels = {"token_k1": "token", "seq_sum_k1": "sequence_product", "seq_mean_k1": "geometric_mean"}
    if value not in levels:
        return Left(f"{value} is no rejection here: {', '.join(levels)} are", {})
    *low, high = str(theirs["algorithm.rollout_correction.rollout_rs_threshold"]).split("_")
    bounds = float(low[0]) if low else 1 / float(high), float(high)
    settings = {"level": levels[value], "low": 1 / bounds[1], "high": 1 / bounds[0]}
    path = "spec.algorithm.importanceSampling.rejection"
    return Written(
        {f"{path}.{name}": each for name, each in settings.items()},
        "verl bounds the inverse ratio; what is rejected counts in the mean here, and does not there",
    )


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
    buffer = _overlong(theirs)
    if buffer is not None:
        terms.append(buffer)
    return Left(left, {"spec.rewards": terms}) if left else Written({"spec.rewards": terms})


def _overlong(theirs: Theirs) -> dict[str, Any] | None:
    for place in ("reward.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        if theirs[f"{place}.enable"]:
            term: dict[str, Any] = {"name": "length", "length": {"bufferTokens": theirs.whole(f"{place}.len")}}
            factor = theirs.number(f"{place}.penalty_factor")
            return term | ({"weight": factor} if factor != 1 else {})
    return None


def files(value: Any, theirs: Theirs) -> Outcome:
    if value is None:
        return Left("no dataset is named: write the file of your prompts", {"spec.data.source": "train.parquet"})
    files = list(value) if isinstance(value, list) else [value]
    if len(files) > 1:
        return Left(
            f"it has {len(files)} files, and data.source is one: join them", {"spec.data.source": str(files[0])}
        )
    return Written({"spec.data.source": str(files[0])})


def evaluation(value: Any, theirs: Theirs) -> Outcome:
    if value is None:
        return None
    files = list(value) if isinstance(value, list) else [value]
    kwargs = f"{ROLLOUT}.val_kwargs"
    values: dict[str, Any] = {
        "spec.evaluation.data.source": str(files[0]),
        "spec.evaluation.samplesPerPrompt": theirs.whole(f"{kwargs}.n"),
    }
    if theirs.whole("trainer.test_freq") > 0:
        values["spec.evaluation.everySteps"] = theirs.whole("trainer.test_freq")
    if len(files) > 1:
        return Left(f"it has {len(files)} files, and evaluation.data.source is one: join them", values)
    greedy = "" if theirs[f"{kwargs}.do_sample"] else "verl takes the likeliest tokens, here they are sampled"
    return Written(values, greedy)


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
    chosen = theirs[f"{OPTIMIZER}.warmup_style"] or value
    return one_of(
        "optimizer.schedule",
        {"constant": "constant", "cosine": "cosine"},
        "verl's are constant and cosine",
        "constant",
    )(chosen, theirs)


def betas(value: Any, theirs: Theirs) -> Outcome:
    beta1, beta2 = value
    return Written({"spec.optimizer.beta1": float(beta1), "spec.optimizer.beta2": float(beta2)})


# --- model and run ---


def _rank(theirs: Theirs) -> int:
    return theirs.whole(f"{MODEL}.lora_rank") or theirs.whole(f"{MODEL}.lora.rank")


def lora(value: Any, theirs: Theirs) -> Outcome:
    if not _rank(theirs):
        return None
    targets = theirs[f"{MODEL}.target_modules"]
    return Written(
        {
            "spec.model.lora.rank": _rank(theirs),
            "spec.model.lora.alpha": theirs.number(f"{MODEL}.lora_alpha"),
            "spec.model.lora.targetModules": [targets] if isinstance(targets, str) else list(targets),
        }
    )


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
    return Unneeded("no warm-up") if not value else Written({"spec.algorithm.critic.warmupSteps": int(value)})
