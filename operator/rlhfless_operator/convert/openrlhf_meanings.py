"""Conversions of OpenRLHF's arguments that differ in more than the name. Each belongs to a row of `openrlhf.py`."""

import dataclasses
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from rlhfless_operator.convert.conversion import Left, Outcome, Theirs, Written, job_name, to
from rlhfless_operator.convert.datasets import entries_to

_ESTIMATORS = {
    "gae": ("ppo", "gae", "batch"),
    "reinforce": ("reinforce_plus_plus", "discounted", "batch"),
    "rloo": ("grpo", "leave_one_out", "none"),
    "reinforce_baseline": ("grpo", "group", "batch"),
    "group_norm": ("grpo", "group", "group"),
    "dr_grpo": ("grpo", "group", "none"),
}
"""Our name of the algorithm, our advantage, and its normalization."""


def name(value: Any, theirs: Theirs) -> Outcome:
    folder = PurePosixPath(str(theirs["ckpt.output_dir"])).name if "ckpt.output_dir" in theirs.given else theirs.name
    return Written({"metadata.name": job_name(str(value or folder))})


def output(value: Any, theirs: Theirs) -> Outcome:
    if "ckpt.output_dir" not in theirs.given:
        return None
    parent = str(PurePosixPath(str(value)).parent)
    return Written({"spec.artifacts.uri": "runs" if parent == "." else parent}, "the job's name is its folder there")


def model(value: Any, theirs: Theirs) -> Outcome:
    return None if value is None else Written({"spec.model.source": str(value)})


def lora(value: Any, theirs: Theirs) -> Outcome:
    if not theirs.whole("ds.lora.rank"):
        return None
    targets = theirs["ds.lora.target_modules"]
    values = {
        "rank": theirs.whole("ds.lora.rank"),
        "alpha": theirs.number("ds.lora.alpha"),
        "dropout": theirs.number("ds.lora.dropout"),
        "targetModules": [targets] if isinstance(targets, str) else list(targets),
    }
    return Written({f"spec.model.lora.{field}": each for field, each in values.items()})


# --- data and rewards ---


def _entry(name: str, split: str) -> dict[str, Any]:
    """Return the arguments of `load_dataset`; a name of OpenRLHF may have a folder after an `@`."""
    name, _, folder = name.strip().partition("@")
    return {"path": name, "split": split, "data_dir": folder.strip() or None}


def _sources(section: str, value: Any, split: str) -> Written | Left:
    return entries_to(section, [_entry(name, split) for name in str(value).split(",") if name.strip()])


def dataset(value: Any, theirs: Theirs) -> Outcome:
    if value is None:
        return Left("no dataset is named: write the file of your prompts", {"spec.data.source": "train.jsonl"})
    outcome = _sources("spec.data", value, str(theirs["data.prompt_split"]))
    values = {**outcome.values, "spec.data.longPrompts": "drop"}
    if isinstance(outcome, Left):
        return Left(outcome.reason, values)
    return Written(values, "prompts that are too long are dropped")


def shares(value: Any, theirs: Theirs) -> Outcome:
    """Leave the shares of the sources to the user: a weight depends on how many rows each source has."""
    if value is None or "," not in str(theirs["data.prompt_dataset"]):
        return None
    return Left(
        "a source's weight is how often each of its rows comes in an epoch: write its share × the rows of all sources /"
        " its own rows into data.sources[].weight"
    )


def template(value: Any, theirs: Theirs) -> Outcome:
    if value:
        return None
    return Left("without it prompts are text as it is: rlhfless uses a chat template for chats, and none for text")


def rewards(value: Any, theirs: Theirs) -> Outcome:
    terms: list[dict[str, Any]] = []
    notes: list[str] = []
    for source in _listed(value):
        if source.endswith(".py"):
            python = {"file": source, "function": "reward_func", "style": "openrlhf"}
            terms.append({"name": "score", "python": python})
        else:
            terms.append({"name": "server", "http": {"url": source}})
    if not terms:
        terms = [{"name": "model", "model": {"source": each}} for each in _listed(theirs["reward.model_name_or_path"])]
    if not terms:
        terms.append({"name": "reward", "python": {"file": "reward.py", "function": "reward"}})
        notes.append("no reward is named: put yours into reward.py")
    for number, term in enumerate(terms[1:], 2):
        term["name"] = f"{term['name']}-{number}"
    buffer = theirs["reward.overlong_buffer_len"]
    if buffer is not None:
        factor = theirs.number("reward.overlong_penalty_factor")
        length: dict[str, Any] = {"name": "length", "length": {"bufferTokens": int(float(buffer))}}
        terms.append(length | ({"weight": factor} if factor != 1 else {}))
    values = {"spec.rewards": terms}
    return Left("; ".join(notes), values) if notes else Written(values)


def _listed(value: Any) -> list[str]:
    return [] if not value else [each for each in str(value).split(",") if each]


# --- algorithm ---


def advantage(value: Any, theirs: Theirs) -> Outcome:
    if value not in _ESTIMATORS:
        return Left(
            f"{value} is no advantage here; the group's mean is written instead",
            {"spec.algorithm.name": "grpo", "spec.algorithm.advantage": "group"},
        )
    algorithm, advantage, normalization = _ESTIMATORS[value]
    values = {
        "spec.algorithm.name": algorithm,
        "spec.algorithm.advantage": advantage,
        "spec.algorithm.advantageNormalization": normalization,
    }
    if theirs["algo.advantage.no_std_norm"] and normalization == "batch":
        values["spec.algorithm.advantageNormalization"] = "none"
        return Left("OpenRLHF subtracts the batch's mean, and does not divide; here neither is done", values)
    return Written(values)


def gamma(value: Any, theirs: Theirs) -> Outcome:
    if theirs["algo.advantage.estimator"] not in ("gae", "reinforce"):
        return None
    return Written({"spec.algorithm.gamma": float(value)})


def of_gae(ours: str) -> Callable[[Any, Theirs], Outcome]:
    """Convert an argument that only matters with a critic."""

    def convert(value: Any, theirs: Theirs) -> Outcome:
        return to(ours)(value, theirs) if theirs["algo.advantage.estimator"] == "gae" else None

    return convert


def critic_model(value: Any, theirs: Theirs) -> Outcome:
    if theirs["algo.advantage.estimator"] != "gae":
        return None
    begins = value or (theirs["reward.model_name_or_path"] if not theirs["reward.remote_url"] else None)
    if begins is None or begins == theirs["actor.model_name_or_path"]:
        return None
    return Left(f"the critic begins as a copy of the policy, there as {str(begins).partition(',')[0]}")


def critic_warmup(value: Any, theirs: Theirs) -> Outcome:
    if theirs["algo.advantage.estimator"] != "gae" or int(value) < 1:
        return None
    return Written({"spec.algorithm.critic.warmupSteps": int(value)})


def loss(value: Any, theirs: Theirs) -> Outcome:
    kinds = {"ppo": ("token", "token-mean"), "gspo": ("sequence", "seq-mean-token-mean")}
    level, mean = kinds.get(value, kinds["ppo"])
    values = {
        "spec.algorithm.ratioLevel": level,
        "spec.algorithm.clip": "ppo",
        "spec.algorithm.aggregation": mean,
    }
    return Written(values) if value in kinds else Left(f"{value} is no loss here; PPO's is written", values)


def _bounds(theirs: Theirs) -> tuple[float, float]:
    both = theirs["actor.eps_clip_low_high"]
    if both is None:
        return theirs.number("actor.eps_clip"), theirs.number("actor.eps_clip")
    low, high = both
    return float(low), float(high)


def clip_low(value: Any, theirs: Theirs) -> Outcome:
    return Written({"spec.algorithm.clipLow": min(_bounds(theirs)[0], 1.0)})


def clip_high(value: Any, theirs: Theirs) -> Outcome:
    return Written({"spec.algorithm.clipHigh": _bounds(theirs)[1]})


def kl(value: Any, theirs: Theirs) -> Outcome:
    coefficient = theirs.number("algo.kl.init_coef")
    if not coefficient:
        return Written({"spec.algorithm.kl.coefficient": 0.0})
    in_loss, kind = bool(theirs["algo.kl.use_loss"]), str(theirs["algo.kl.estimator"])
    allowed = kind in ("k2", "k3") if in_loss else kind == "k1"
    settings: dict[str, Any] = {
        "coefficient": coefficient,
        "placement": "loss" if in_loss else "reward",
        "estimator": kind if allowed else "k2" if in_loss else "k1",
    }
    values = {f"spec.algorithm.kl.{field}": each for field, each in settings.items()}
    if not allowed:
        return Left(f"{kind} has another gradient there; {settings['estimator']} is written instead", values)
    if not in_loss and theirs["algo.advantage.estimator"] not in ("gae", "reinforce"):
        return Left("OpenRLHF subtracts it token by token after the baseline, here before it, from the reward", values)
    return Written(values)


UNBOUNDED = 1e9
"""More than any possible ratio."""


def correction(value: Any, theirs: Theirs) -> Outcome:
    path = "spec.algorithm.importanceSampling"
    if not value:
        return Written({f"{path}.mode": "none"}, "OpenRLHF corrects nothing unless it is told to")
    if theirs["actor.policy_loss_type"] == "gspo":
        values = {f"{path}.mode": "none", "spec.algorithm.proximalPolicy": "sampler"}
        return Written(values, "gspo's ratio is to the sampler then")
    threshold = theirs["algo.advantage.is_correction_threshold"]
    low, high = threshold if isinstance(threshold, list) else (None, threshold)
    kind = theirs["algo.advantage.is_correction_type"]
    bounds = {"high": float(high)} | ({} if low is None else {"low": float(low)})
    if kind == "seq-mask-tis":
        written = {f"{path}.mode": "truncate", f"{path}.level": "token", f"{path}.high": UNBOUNDED}
        rejected: dict[str, Any] = {"level": "geometric_mean", **bounds}
        return Written(written | {f"{path}.rejection.{field}": each for field, each in rejected.items()})
    settings: dict[str, Any] = {"mode": "mask" if kind == "icepop" else "truncate", "level": "token", **bounds}
    values = {f"{path}.{field}": each for field, each in settings.items()}
    return Written(values) if kind in ("tis", "icepop") else Left(f"{kind} is no correction here", values)


def filtering(value: Any, theirs: Theirs) -> Outcome:
    if not value:
        return Written({"spec.algorithm.dynamicSamplingRounds": 0})
    low, high = theirs["algo.dynamic_filtering_range"]
    values = {"spec.algorithm.dynamicSamplingRounds": 16}
    return Left(
        f"OpenRLHF keeps groups whose mean reward is between {low} and {high}; here those of unequal rewards", values
    )


# --- batch, optimizer, run ---


def longest_response(value: Any, theirs: Theirs) -> Outcome:
    if value is not None:
        return Written({"spec.sampling.maxResponseTokens": int(value)})
    half = max(theirs.whole("data.max_len") // 2, 1)
    why = "OpenRLHF gives a response what its prompt leaves of max_len; half of it is written"
    return Left(why, {"spec.sampling.maxResponseTokens": half})


def longest_prompt(value: Any, theirs: Theirs) -> Outcome:
    if theirs["data.prompt_max_len"] is not None:
        return Written({"spec.sampling.maxPromptTokens": theirs.whole("data.prompt_max_len")})
    whole, response = theirs.whole("data.max_len"), theirs["rollout.max_new_tokens"]
    rest = whole - int(response) if response is not None else whole // 2
    return Written({"spec.sampling.maxPromptTokens": max(rest, 1)}, f"{whole} tokens, prompt and response")


def minibatch(value: Any, theirs: Theirs) -> Outcome:
    step = theirs.whole("rollout.batch_size") * theirs.whole("rollout.n_samples_per_prompt")
    size = theirs.whole("train.batch_size")
    if size >= step:
        return None
    if step % size:
        return Left(f"{size} samples do not divide the {step} of a step; a step is one update instead")
    return Written({"spec.batch.minibatchSamples": size}, f"{step // size} updates a step")


def microbatch(value: Any, theirs: Theirs) -> Outcome:
    return Written({"spec.batch.microbatchTokens": int(value)}) if theirs["train.dynamic_batch_enable"] else None


def betas(value: Any, theirs: Theirs) -> Outcome:
    beta1, beta2 = value
    return Written({"spec.optimizer.beta1": float(beta1), "spec.optimizer.beta2": float(beta2)})


_SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def schedule(value: Any, theirs: Theirs) -> Outcome:
    if value in _SCHEDULES:
        return Written({"spec.optimizer.schedule": _SCHEDULES[value]})
    return Left(f"{value}: schedules are constant, linear and cosine", {"spec.optimizer.schedule": "constant"})


def final_ratio(value: Any, theirs: Theirs) -> Outcome:
    if theirs["actor.lr_scheduler"] != "cosine_with_min_lr":
        return None
    return Written({"spec.optimizer.finalRatio": float(value)})


def warmup(value: Any, theirs: Theirs) -> Outcome:
    if not float(value) or theirs["actor.lr_scheduler"] == "constant":
        return Written({"spec.optimizer.warmupSteps": 0})
    return Left(
        f"{float(value):g} of the steps: write optimizer.warmupSteps once you know them; an epoch has as many as there"
        " are prompts / batch.promptsPerStep"
    )


def asynchronous(value: Any, theirs: Theirs) -> Outcome:
    if not value:
        return None
    values = {"spec.async.maxStaleness": max(1, min(8, theirs.whole("train.async_queue_size")))}
    if theirs["train.partial_rollout_enable"]:
        values["spec.async.newWeights"] = "switch"  # type: ignore[assignment]
    return Written(values, "as many versions as the queue holds")


def engines(value: Any, theirs: Theirs) -> Outcome:
    if value is None or int(value) < 1:
        return None
    return Written({"spec.generation.engine": "vllm", "spec.generation.instances.max": int(value)})


def evaluation(value: Any, theirs: Theirs) -> Outcome:
    if value is None:
        return None
    outcome = _sources("spec.evaluation.data", value, str(theirs["eval.split"]))
    temperature = theirs.number("eval.temperature")
    values: dict[str, Any] = {
        **outcome.values,
        "spec.evaluation.data.promptColumn": str(theirs["data.input_key"]),
        "spec.evaluation.samplesPerPrompt": theirs.whole("eval.n_samples_per_prompt") if temperature else 1,
        "spec.evaluation.sampling.temperature": temperature,
    }
    if theirs["data.label_key"] is not None:
        values["spec.evaluation.data.groundTruthColumn"] = str(theirs["data.label_key"])
    if theirs.whole("eval.steps") > 0:
        values["spec.evaluation.everySteps"] = theirs.whole("eval.steps")
    return dataclasses.replace(outcome, values=values)


def checkpoints(value: Any, theirs: Theirs) -> Outcome:
    return Written({"spec.checkpoints.everySteps": int(value)}) if float(value) > 0 else None


def tracker(value: Any, theirs: Theirs) -> Outcome:
    theirs.forget()  # whether there is a key counts, and not which
    if not theirs.given.get("logger.wandb.key"):
        return None
    note = "the key is WANDB_API_KEY's; it is not written into a job"
    return Written({"spec.tracking.wandb": {"project": str(theirs["logger.wandb.project"])}}, note)


def tensorboard(value: Any, theirs: Theirs) -> Outcome:
    return Written({"spec.tracking.tensorboard": True}) if value else None
