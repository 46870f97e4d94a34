"""Importance ratios: how much likelier the policy makes a response than what sampled it."""

from typing import Literal

import torch

from rlhfless_functions.algorithms.aggregation import masked

RatioLevel = Literal["token", "sequence", "sequence_product"]

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are kept within this before exponentiation; beyond it nothing is learnt."""


def importance_ratio(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """π / π_old, with gradients through `log_probs`.

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


def sampler_ratio(old_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """π_old / π_sampler of each token [samples, tokens], detached; 1 where the mask is False.

    The two differ by the engine's numerics, and by weights where a response was continued after an update. Their mean
    over samples is 1 only if the sampler's log-probabilities are those that it sampled with: at the same temperature,
    and over the whole vocabulary. Under top-p = 0.9 it would be about 0.9 (TRL issue 6789), hence no such setting.
    """
    difference = masked(old_log_probs - sampler_log_probs, mask).detach()
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weights(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance sampling: min(π_old / π_sampler, cap), the weight of each token's policy loss.

    TRL's `vllm_importance_sampling_mode="token_truncate"` (Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025).

    Args:
        ratio: of `sampler_ratio`.
        cap: upper bound, above 0.
    """
    return ratio.clamp(max=cap)
