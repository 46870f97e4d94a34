"""Distance to the reference policy: estimators of KL(policy ‖ reference) from the sampled tokens.

The valid placement of an estimator follows from its gradient, not from its value (arXiv 2512.21852; TRL issue 4967). In
the reward, k1 is unbiased; k2 and k3 have a different gradient. In the loss, the gradient of k1 has mean zero, and that
of k3 belongs to another divergence. k2, and k3 times the importance ratio, have the gradient of the true KL:

    ∇ k2      = (log π − log π_ref) ∇ log π
    ∇ (ρ k3)  = ρ (log π − log π_ref) ∇ log π,   with ρ = π / π_old

Both are exact for samples of π itself. The weighted k3 stays exact once π has moved from π_old within a step; k2 does
not, by as much as ρ differs from 1.
"""

from typing import Literal

import torch

from rlhfless_functions.algorithms.ratios import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_probs: torch.Tensor, reference_log_probs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Return KL(policy ‖ reference) in nats, estimated at each sampled token (Schulman, "Approximating KL divergence",
    2020).

    Args:
        log_probs: of the sampled tokens under the policy, any shape.
        reference_log_probs: of the same tokens under the reference, same shape.
        estimator: k1 = δ, unbiased and of either sign; k2 = δ²/2; k3 = exp(−δ) − 1 + δ, unbiased and never negative;
            with δ = log π − log π_ref.
    """
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1((-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + difference


def kl_loss(
    log_probs: torch.Tensor, reference_log_probs: torch.Tensor, ratio: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """Return the penalty per token for the loss, whose gradient is that of the true KL.

    The gradient of ρ k3 is implemented directly, not by differentiating the value: as the sum of ρ k3 and ρ (1 −
    exp(−δ)) it would lose its digits in float32. Beyond the bound of exp(−δ), which keeps the value finite, it would be
    the gradient of another function.

    Args:
        log_probs: of the sampled tokens under the policy, with gradients.
        reference_log_probs: of the same tokens under the reference.
        ratio: π / π_old of each token, at every ratio level of the policy loss. This is TRL's `use_bias_correction_kl`,
            except that TRL takes the sequence's ratio with sequence-level losses, and then the gradient is not that of
            the KL.
        estimator: k2, which is taken as it is, or k3, which is multiplied by the ratio.

    Raises:
        ValueError: the estimator is k1.
    """
    if estimator == "k1":
        raise ValueError("estimator: k1 in the loss has a gradient of mean zero; use k2 or k3, or placement: reward")
    if estimator == "k2":
        return kl_estimate(log_probs, reference_log_probs, "k2")
    value = ratio.detach() * kl_estimate(log_probs.detach(), reference_log_probs, "k3")
    slope = ratio.detach() * (log_probs.detach() - reference_log_probs)
    return value + slope * (log_probs - log_probs.detach())
