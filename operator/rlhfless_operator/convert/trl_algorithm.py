"""Conversions of TRL's fields of GRPO's loss. Each function belongs to a row of `trl.py`."""

from typing import Any

from rlhfless_operator.convert.conversion import Left, Outcome, Theirs, Unneeded, Written
from rlhfless_operator.job.reading.familiar_values import SCALINGS


def loss(value: Any, theirs: Theirs) -> Outcome:
    aggregations = {
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "cispo": "token-mean",
        "sapo": "seq-mean-token-mean",
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    }
    if value not in aggregations:
        return Left(
            f"{value} is no loss here; token-mean with PPO's clipping is written instead",
            {"spec.algorithm.aggregation": "token-mean"},
        )
    note = {
        "dapo": "TRL's dapo is its mean over tokens alone, without dynamic sampling",
        "bnpo": "TRL's mean is over each device's tokens, this one over the update's",
    }.get(value, "")
    written = {"spec.algorithm.name": "grpo", "spec.algorithm.clip": value if value in ("cispo", "sapo") else "ppo"}
    return Written({**written, "spec.algorithm.aggregation": aggregations[value]}, note)


def scaling(value: Any, theirs: Theirs) -> Outcome:
    if theirs["multi_objective_aggregation"] == "normalize_then_sum":
        return Written({"spec.algorithm.advantageNormalization": "group_per_reward"})
    if value not in SCALINGS:
        return Left(f"{value} is no scale; rewards are scaled by group, batch or not at all")
    written = {"spec.algorithm.advantageNormalization": SCALINGS[value]}
    if value == "batch":
        return Left("TRL divides by the deviation of all rewards, here advantages are whitened over tokens", written)
    return Written(written)


def clip_low(value: Any, theirs: Theirs) -> Outcome:
    if theirs["loss_type"] == "sapo":
        return Unneeded("sapo has a gate instead of bounds")
    if theirs["loss_type"] == "cispo":
        return Written({"spec.algorithm.clipLow": 1.0}, "TRL's cispo has no lower bound")
    return Written({"spec.algorithm.clipLow": theirs.number("epsilon")})


def sapo_temperature(ours: str) -> Any:
    def convert(value: Any, theirs: Theirs) -> Outcome:
        return Written({f"spec.algorithm.{ours}": float(value)}) if theirs["loss_type"] == "sapo" else None

    return convert


def clip_high(value: Any, theirs: Theirs) -> Outcome:
    if theirs["loss_type"] == "sapo":
        return None if value is None else Unneeded("sapo has a gate instead of bounds")
    high = theirs.number("epsilon" if value is None else "epsilon_high")
    if theirs["loss_type"] != "cispo":
        return Written({"spec.algorithm.clipHigh": high})
    if high < 1:
        return Left(
            f"TRL's cispo bounds the weight at {high:g}, below 1; here the bound is 1 + clipHigh",
            {"spec.algorithm.clipHigh": 0.0},
        )
    return Written({"spec.algorithm.clipHigh": round(high - 1, 12)}, f"TRL bounds the weight at {high:g} = 1 + this")


def kl(value: Any, theirs: Theirs) -> Outcome:
    coefficient = theirs.number("beta")
    if not coefficient:
        return Written({"spec.algorithm.kl.coefficient": 0.0})
    note = "TRL weights it by the ratio too (use_bias_correction_kl)" if theirs["use_bias_correction_kl"] else ""
    penalty = {"coefficient": coefficient, "placement": "loss", "estimator": "k3"}
    return Written({f"spec.algorithm.kl.{name}": value for name, value in penalty.items()}, note)


CORRECTION = tuple(f"vllm_importance_sampling_{part}" for part in ("correction", "clip_max", "clip_min", "cap"))
"""Fields that are read together with the mode of TRL's correction."""


UNBOUNDED = 1e9
"""More than any possible ratio: their logarithms are bounded by 20."""

MODES = {
    "token_truncate": ("truncate", "token"),
    "token_mask": ("mask", "token"),
    "sequence_truncate": ("truncate", "sequence_product"),
    "sequence_mask": ("mask", "sequence_product"),
}


def importance_sampling(value: Any, theirs: Theirs) -> Outcome:
    """Convert the correction, which TRL applies where vLLM generates, by default with whole sequences masked."""
    if not theirs["use_vllm"] or not theirs["vllm_importance_sampling_correction"]:
        return Written({"spec.algorithm.importanceSampling.mode": "none"}, "TRL corrects nothing here")
    if value not in MODES:
        return Left(f"{value} is no mode; tokens are truncated", {"spec.algorithm.importanceSampling.mode": "truncate"})
    low, high = theirs["vllm_importance_sampling_clip_min"], theirs["vllm_importance_sampling_clip_max"]
    high = theirs["vllm_importance_sampling_cap"] or high
    mode, level = MODES[value]
    settings = {"mode": mode, "level": level, "high": float(high if high is not None else UNBOUNDED)}
    if low is not None:
        settings["low"] = float(low)
    note = "" if high is not None else "TRL has no upper bound here"
    return Written({f"spec.algorithm.importanceSampling.{name}": each for name, each in settings.items()}, note)
