"""Statistics of learning, as moments that add up over micro-batches, minibatches and ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from rlhfless_functions.algorithms.kl import kl_estimate
from rlhfless_functions.algorithms.ratios import MAX_LOG_RATIO, sampler_ratio
from rlhfless_functions.settings import ImportanceSamplingSettings

WITH_EXTREMES = frozenset({"advantage", "ratio", "return", "sampler_ratio", "value"})
"""Quantities that are reported with spread and extremes besides their mean."""


@dataclass(frozen=True)
class Moments:
    """Count, sum, sum of squares, least and greatest of a quantity. They stay on the device until `summarize`."""

    data: torch.Tensor
    """float64 [5]"""

    @classmethod
    def of(cls, values: torch.Tensor, mask: torch.Tensor) -> Self:
        """Return the moments of the values where the mask is True; both of one shape."""
        values, infinity = values.detach().double(), torch.inf
        chosen = torch.where(mask, values, 0.0)
        return cls(
            torch.stack(
                [
                    mask.sum().double(),
                    chosen.sum(),
                    chosen.square().sum(),
                    torch.where(mask, values, infinity).amin() if mask.numel() else values.new_tensor(infinity),
                    torch.where(mask, values, -infinity).amax() if mask.numel() else values.new_tensor(-infinity),
                ]
            )
        )

    def __add__(self, other: "Moments") -> "Moments":
        sums = self.data[:3] + other.data[:3]
        least = torch.minimum(self.data[3], other.data[3])
        greatest = torch.maximum(self.data[4], other.data[4])
        return Moments(torch.cat([sums, torch.stack([least, greatest])]))


Statistics = dict[str, Moments]
"""Moments of named quantities."""


def add_statistics(left: Mapping[str, Moments], right: Mapping[str, Moments]) -> Statistics:
    """Return the statistics of two disjoint parts of a batch taken together."""
    total = dict(left)
    for name, moments in right.items():
        total[name] = total[name] + moments if name in total else moments
    return total


def policy_statistics(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    entropy: torch.Tensor | None = None,
    sampler_log_probs: torch.Tensor | None = None,
    reference_log_probs: torch.Tensor | None = None,
) -> Statistics:
    """Return statistics of the policy on one micro-batch. All tensors are [samples, tokens]; nothing is differentiated.

    Args:
        log_probs: under the policy now.
        old_log_probs: under the policy that the step started from.
        ratio: of `importance_ratio`; [samples, 1] at a sequence level, where each sample counts once.
        advantages: that the loss uses.
        mask: bool, True on tokens that count.
        clip_low: distance of the lower bound from 1; None if there is no such bound.
        clip_high: distance of the upper bound from 1; the same.
        entropy: of the policy's distribution at each token, in nats.
        sampler_log_probs: as the engine reported them.
        reference_log_probs: under the reference.

    Returns:
        `advantage`; `ratio`; `clip_low` and `clip_high`, the shares whose gradient is clipped away (ratio below its
        bound with a negative advantage, above it with a positive one); `approx_kl`, KL(old ‖ now); `entropy`; `kl`,
        KL(now ‖ reference), both by k3; and those of `sampler_statistics`.
    """
    with torch.no_grad():
        units = mask.any(-1, keepdim=True) if ratio.shape != mask.shape else mask
        sign = torch.where(mask, advantages, 0.0).sum(-1, keepdim=True) if ratio.shape != mask.shape else advantages
        statistics = {
            "advantage": Moments.of(advantages, mask),
            "ratio": Moments.of(ratio, units),
            "approx_kl": Moments.of(kl_estimate(old_log_probs, log_probs, "k3"), mask),
        }
        if clip_low is not None:
            statistics["clip_low"] = Moments.of((ratio < 1 - clip_low) & (sign < 0), units)
        if clip_high is not None:
            statistics["clip_high"] = Moments.of((ratio > 1 + clip_high) & (sign > 0), units)
        if entropy is not None:
            statistics["entropy"] = Moments.of(entropy, mask)
        if reference_log_probs is not None:
            statistics["kl"] = Moments.of(kl_estimate(log_probs, reference_log_probs, "k3"), mask)
        if sampler_log_probs is not None:
            statistics |= sampler_statistics(old_log_probs, sampler_log_probs, mask)
        return statistics


def sampler_statistics(old_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, mask: torch.Tensor) -> Statistics:
    """Return the distance of the trainer from the sampler at equal weights. All tensors are [samples, tokens].

    Args:
        old_log_probs: under the policy that the step started from, by the trainer.
        sampler_log_probs: as the engine reported them.
        mask: bool, True on tokens that count.

    Returns:
        `sampler_ratio`; `sampler_mismatch`, exp|Δ|, whose mean is below 1.05; and `sampler_kl`, k3, below 1e-3.
    """
    with torch.no_grad():
        gap = (old_log_probs - sampler_log_probs).abs()
        return {
            "sampler_ratio": Moments.of(sampler_ratio(old_log_probs, sampler_log_probs, mask), mask),
            "sampler_mismatch": Moments.of(gap.clamp(max=MAX_LOG_RATIO).exp(), mask),
            "sampler_kl": Moments.of(kl_estimate(sampler_log_probs, old_log_probs, "k3"), mask),
        }


def correction_statistics(ratio: torch.Tensor, mask: torch.Tensor, settings: ImportanceSamplingSettings) -> Statistics:
    """Return the shares of tokens that the bounds of the importance weights change.

    Args:
        ratio: of `sampler_ratio` at the settings' level.
        mask: bool [samples, tokens], True on tokens that count.
        settings: with another mode than `none`.

    Returns:
        `correction_low` and `correction_high`, the shares of tokens whose weight is truncated or masked because it is
        below or above its bounds; the first only where there is a lower bound.
    """
    with torch.no_grad():
        statistics = {"correction_high": Moments.of((ratio > settings.high).expand(mask.shape), mask)}
        if settings.low is not None:
            statistics["correction_low"] = Moments.of((ratio < settings.low).expand(mask.shape), mask)
        return statistics


def rejection_statistics(stays: torch.Tensor, mask: torch.Tensor) -> Statistics:
    """Return `rejected`, the share of tokens that are excluded from the policy's loss.

    Args:
        stays: result of `kept`: bool [samples, tokens], or [samples, 1] if whole responses are rejected.
        mask: bool [samples, tokens], True on tokens that count.
    """
    return {"rejected": Moments.of((~stays).expand(mask.shape), mask)}


def critic_statistics(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, value_clip: float | None
) -> Statistics:
    """Return statistics of the critic on one micro-batch. All tensors are [samples, tokens]; nothing is differentiated.

    Returns:
        `value`, `return`, `value_error` (return − value), and `value_clip`, the share of values that moved further than
        the clip allows.
    """
    with torch.no_grad():
        statistics = {
            "value": Moments.of(values, mask),
            "return": Moments.of(returns, mask),
            "value_error": Moments.of(returns - values, mask),
        }
        if value_clip is not None:
            statistics["value_clip"] = Moments.of((values - old_values).abs() > value_clip, mask)
        return statistics


def summarize(statistics: Mapping[str, Moments]) -> dict[str, float]:
    """Return finite numbers for people, read from the device in one transfer.

    Returns:
        The mean under each quantity's name; for those `WITH_EXTREMES` also `_std`, `_min` and `_max`; and the critic's
        `explained_variance`, 1 − Var(return − value) / Var(return). Quantities without a value are missing: quantities
        of no token, and the explained variance of constant returns.
    """
    if not statistics:
        return {}
    rows = torch.stack([moments.data for moments in statistics.values()]).tolist()
    summary: dict[str, float] = {}
    variances: dict[str, float] = {}
    for name, (count, total, squares, least, greatest) in zip(statistics, rows, strict=True):
        if count == 0:
            continue
        mean = total / count
        variances[name] = max(squares / count - mean * mean, 0.0)
        summary[name] = mean
        if name in WITH_EXTREMES:
            summary |= {f"{name}_std": variances[name] ** 0.5, f"{name}_min": least, f"{name}_max": greatest}
    if variances.get("return", 0.0) > 0 and "value_error" in variances:
        summary["explained_variance"] = 1 - variances["value_error"] / variances["return"]
    return summary
