"""Importance ratios: how much likelier a response is under the policy than under the policy that sampled it."""

import math
from typing import Literal

import torch

from rlhfless_functions.algorithms.aggregation import masked
from rlhfless_functions.settings import ImportanceSamplingSettings, RejectionSettings

RatioLevel = Literal["token", "sequence", "sequence_product"]

MAX_LOG_RATIO = 20.0
"""Bound on differences of log-probabilities before exponentiation; beyond it nothing is learnt."""


def importance_ratio(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """Return π / π_old, with gradients through `log_probs`.

    Args:
        log_probs: of the sampled tokens under the policy [samples, tokens].
        old_log_probs: of the same tokens under the policy that the step started from.
        mask: bool [samples, tokens], True on tokens that count.
        level: `token`: of each token (PPO). `sequence`: geometric mean over the sample's tokens (GSPO, arXiv
            2507.18071, eq. 7). `sequence_product`: of the whole sample, the product over its tokens (RLOO, arXiv
            2402.14740, which takes a response as one action).

    Returns:
        [samples, tokens] for `token`, else [samples, 1]; 1 where the mask is False.
    """
    log_ratio = masked(log_probs - old_log_probs, mask)
    if level != "token":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    if level == "sequence":
        log_ratio = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_geometric_mean(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Return the geometric mean over a sample's tokens of min(ρ A, clip(ρ, 1 − low, 1 + high) A) / A (GMPO, arXiv
    2507.20673).

    Args:
        log_probs: of the sampled tokens under the policy [samples, tokens], with gradients.
        old_log_probs: of the same tokens under the policy that the step started from.
        advantages: A [samples, tokens], of one sign in each sample; ratios are clipped above where it is positive, and
            below elsewhere.
        mask: bool, True on tokens that count.
        clip_low: distance of the lower bound from 1, at most 1.
        clip_high: distance of the upper bound from 1.

    Returns:
        [samples, 1]; 1 for a sample without a token.
    """
    log_ratio = masked(log_probs - old_log_probs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lowest = math.log1p(-clip_low) if clip_low < 1 else -MAX_LOG_RATIO
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=math.log1p(clip_high)), log_ratio.clamp(min=lowest))
    return (clipped.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()


def sampler_ratio(
    old_log_probs: torch.Tensor,
    sampler_log_probs: torch.Tensor,
    mask: torch.Tensor,
    level: Literal["token", "sequence_product", "geometric_mean"] = "token",
) -> torch.Tensor:
    """Return π_old / π_sampler, detached, of each token [samples, tokens] or of each sample [samples, 1]; 1 outside the
    mask.

    The two differ by the engine's numerics, and by weights where a response was continued after an update. Their mean
    over samples is 1 only if the sampler's log-probabilities are those that it sampled with: at the same temperature,
    and over the whole vocabulary. Under top-p = 0.9 it would be about 0.9 (TRL issue 6789), hence no such setting.
    """
    same = "sequence" if level == "geometric_mean" else level
    return importance_ratio(old_log_probs.detach(), sampler_log_probs.detach(), mask, same)


def correction_weights(ratio: torch.Tensor, settings: ImportanceSamplingSettings) -> torch.Tensor:
    """Return the weight of the policy loss that corrects for the sampler: the ratio, truncated or masked at its bounds.

    Truncation is TIS (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025).
    Masking by token is IcePop (arXiv 2510.18855), by response MIS. Masked tokens still count in the loss's mean, so
    their share changes no other token's weight. These are TRL's `vllm_importance_sampling_mode`, and verl's
    `rollout_is` with one bound (truncation) or two (masking).

    Args:
        ratio: of `sampler_ratio` at the settings' level.
        settings: with another mode than `none`.
    """
    if settings.mode == "truncate":
        return ratio.clamp(settings.low, settings.high)
    return ratio * _within(ratio, settings.low, settings.high)


def kept(ratio: torch.Tensor, settings: RejectionSettings) -> torch.Tensor:
    """Return which tokens stay in the policy's loss: True where the ratio is within its bounds, which are included.

    By the geometric mean this is the mask of Liu et al., "When Speed Kills Stability" (2025), and of DeepSeek-V3.2
    (arXiv 2512.02556): verl's `rollout_rs: seq_mean_k1`, SkyRL's geometric mask. By the product it is verl's
    `seq_sum_k1`, by token `token_k1` and SkyRL's token mask. Importance weights are separate (`correction_weights`), as
    in NeMo-RL's seq-mask-tis and in AReaL's `rejection_sampling`.

    Args:
        ratio: of `sampler_ratio` at the settings' level.
        settings: the bounds.
    """
    return _within(ratio, settings.low, settings.high)


def _within(ratio: torch.Tensor, low: float | None, high: float) -> torch.Tensor:
    return ratio <= high if low is None else (ratio <= high) & (ratio >= low)
