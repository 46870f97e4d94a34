"""Conversions of verl's fields of its algorithm. Each function belongs to a row of `verl.py`."""

import math
from collections.abc import Callable
from typing import Any

from rlhfless_operator.convert.conversion import Left, Outcome, Theirs, Written, to
from rlhfless_operator.job.reading.familiar_names import our_choice

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"

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


_LOSSES = {
    "vanilla": ("token", "ppo"),
    "gspo": ("sequence", "ppo"),
    "cispo": ("token", "cispo"),
    "geo_mean": ("sequence", "gmpo"),
    "sapo": ("token", "sapo"),
}
"""Our ratio level and clipping for each of verl's losses."""

_BY_SEQUENCE = ("geo_mean", "sapo")
"""Losses that are the mean of the sequences' means, in any loss_agg_mode."""


def _loss(theirs: Theirs) -> str:
    return str(theirs[f"{ACTOR}.policy_loss.loss_mode"])


def loss_mode(value: Any, theirs: Theirs) -> Outcome:
    level, clip = _LOSSES.get(value, _LOSSES["vanilla"])
    values = {"spec.algorithm.ratioLevel": level, "spec.algorithm.clip": clip}
    return Written(values) if value in _LOSSES else Left(f"{value} is no loss here; PPO's clipping is written", values)


def clip(field: str, ours: str) -> Callable[[Any, Theirs], Outcome]:
    """Convert one side's bound. verl uses clip_ratio for it only if that side's own field is null."""

    def convert(value: Any, theirs: Theirs) -> Outcome:
        if _loss(theirs) == "sapo":
            return None
        name = f"{ACTOR}.{field}"
        inherited = value is None or (name not in theirs.given and f"{ACTOR}.clip_ratio" in theirs.given)
        note = f"verl reads clip_ratio only where {field} is null; its default is 0.2" if inherited else ""
        bound = theirs.number(f"{ACTOR}.clip_ratio") if value is None else theirs.number(name)
        ratio, meaning = _ratio_bound(bound, _loss(theirs), low=ours == "clipLow")
        notes = "; ".join(each for each in (note if value is not None else "", meaning) if each)
        return Written({f"spec.algorithm.{ours}": ratio}, notes)

    return convert


def _ratio_bound(bound: float, loss: str, *, low: bool) -> tuple[float, str]:
    """Return the distance from 1 at which ratios are clipped, and a note on how it was computed."""
    if loss == "geo_mean":
        ratio = 1 - math.exp(-bound) if low else math.exp(bound) - 1
        return round(ratio, 12), f"verl clips the logarithm of the ratio, at {bound:g}"
    if low and bound > 1:
        return 1.0, f"a ratio is never below 1 - {bound:g}"
    return bound, ""


def tau(ours: str) -> Callable[[Any, Theirs], Outcome]:
    """Convert a temperature of SAPO's gate."""

    def convert(value: Any, theirs: Theirs) -> Outcome:
        return Written({f"spec.algorithm.{ours}": float(value)}) if _loss(theirs) == "sapo" else None

    return convert


def dual_clip(value: Any, theirs: Theirs) -> Outcome:
    if value is None or _loss(theirs) != "vanilla":
        return None
    return Written({"spec.algorithm.dualClip": float(value)})


def aggregation(value: Any, theirs: Theirs) -> Outcome:
    if _loss(theirs) in _BY_SEQUENCE:
        note = f"{_loss(theirs)} is so in any loss_agg_mode"
        return Written({"spec.algorithm.aggregation": "seq-mean-token-mean"}, note)
    if value in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        return Written({"spec.algorithm.aggregation": value})
    summed = our_choice(str(value), ("seq-mean-token-sum-norm",))
    instead = summed or "token-mean"
    divided = " (its gradient is divided by the longest response as well)" if summed else ""
    return Left(f"{value} is not there; {instead} is written instead{divided}", {"spec.algorithm.aggregation": instead})


def scale_factor(value: Any, theirs: Theirs) -> Outcome:
    if value is None or theirs[f"{ACTOR}.loss_agg_mode"] != "seq-mean-token-sum-norm":
        return None
    if theirs.number(f"{ACTOR}.loss_scale_factor") == theirs.number("data.max_response_length"):
        return None
    return Left("sums are divided by the longest response, sampling.maxResponseTokens")


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


OLD_CORRECTION = ("algorithm.rollout_is", f"{ACTOR}.tis_imp_ratio_cap")
"""Fields of older releases that switch the correction on."""


def correction(value: Any, theirs: Theirs) -> Outcome:
    """Convert the correction: verl truncates at one bound, and masks outside two bounds, written as `low_high`."""
    cap = theirs[f"{ACTOR}.tis_imp_ratio_cap"]
    if theirs[f"{CORRECTION}.bypass_mode"]:
        return Written({"spec.algorithm.importanceSampling.mode": "none"}, "the ratio itself is to the sampler")
    if value is None and theirs["algorithm.rollout_is"]:
        return _old_correction(theirs)
    if value is None and cap is not None and float(cap) > 0:
        return Written(_corrected(mode="truncate", level="token", high=float(cap)))
    if value is None:
        none = {"spec.algorithm.importanceSampling.mode": "none"}
        return Written(none, "verl corrects nothing unless it is told to")
    *low, high = str(theirs[f"{CORRECTION}.rollout_is_threshold"]).split("_")
    settings: dict[str, Any] = {"mode": "mask" if low else "truncate", "level": "token", "high": float(high)}
    if low:
        settings["low"] = float(low[0])
    if value == "sequence":
        settings["level"] = "sequence_product"
    written = _corrected(**settings)
    if value not in ("token", "sequence"):
        return Left(f"{value} is no level; tokens are corrected by themselves", written)
    return Written(written)


def _corrected(**settings: Any) -> dict[str, Any]:
    return {f"spec.algorithm.importanceSampling.{name}": value for name, value in settings.items()}


def _old_correction(theirs: Theirs) -> Outcome:
    """Convert the names of verl 0.6: `algorithm.rollout_is` with a level, a mode and bounds of their own."""
    high = theirs["algorithm.rollout_is_threshold"]
    if high is None:
        return Written(_corrected(mode="none"), "without a threshold verl weighs nothing")
    levels = {"token": "token", "sequence": "sequence_product", "geometric": "geometric_mean"}
    level, mode = theirs["algorithm.rollout_is_level"], theirs["algorithm.rollout_is_mode"]
    settings: dict[str, Any] = {"mode": "mask" if mode in ("mask", "clip") else "truncate", "high": float(high)}
    settings["level"] = levels.get(level, "token")
    low = theirs["algorithm.rollout_is_threshold_lower"]
    if settings["mode"] == "mask":
        settings["low"] = 1 / float(high) if low is None else float(low)
    if level not in levels or mode not in ("mask", "clip", "truncate"):
        return Left(f"{level} and {mode} are no level and mode here", _corrected(**settings))
    return Written(_corrected(**settings))


def bypass(value: Any, theirs: Theirs) -> Outcome:
    if not value:
        return None
    written = {"spec.algorithm.proximalPolicy": "sampler"}
    if theirs[f"{CORRECTION}.loss_type"] != "ppo_clip":
        return Left("its loss has no clipping (loss_type); the ratio is clipped here", written)
    return Written(written)


def rejection(value: Any, theirs: Theirs) -> Outcome:
    """Convert the bounds of the inverse ratio: `low_high`, or `high` with 1 / high as the lower bound."""
    if value is None:
        return None
    levels = {"token_k1": "token", "seq_sum_k1": "sequence_product", "seq_mean_k1": "geometric_mean"}
    if value not in levels:
        return Left(f"{value} is no rejection here: {', '.join(levels)} are", {})
    *low, high = str(theirs[f"{CORRECTION}.rollout_rs_threshold"]).split("_")
    bounds = float(low[0]) if low else 1 / float(high), float(high)
    settings = {"level": levels[value], "low": 1 / bounds[1], "high": 1 / bounds[0]}
    path = "spec.algorithm.importanceSampling.rejection"
    return Written(
        {f"{path}.{name}": each for name, each in settings.items()},
        "verl bounds the inverse ratio; what is rejected counts in the mean here, and does not there",
    )
