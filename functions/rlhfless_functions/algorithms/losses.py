"""Losses per token: clipped surrogate objectives of the policy, and the critic's regression."""

import torch


def ppo_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> torch.Tensor:
    """Return −min(ρ A, clip(ρ, 1 − low, 1 + high) A), the clipped surrogate objective (PPO, arXiv 1707.06347, eq. 7).

    Different bounds below and above are DAPO's clip-higher (arXiv 2503.14476, eq. 10).

    Args:
        ratio: ρ [samples, tokens], or [samples, 1] for the sequence's ratio, with gradients.
        advantages: A [samples, tokens].
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: where A is negative, the loss is at most this multiple of −A (arXiv 1912.09729, eq. 5); above 1.

    Returns:
        [samples, tokens]
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def cispo_loss(
    ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Return −sg(clip(ρ, 1 − low, 1 + high)) A log π, which clips the weight and keeps every token's gradient (CISPO).

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. TRL's `epsilon_high` for CISPO is the bound itself, 1 + `clip_high` here,
    and it has no lower bound, `clip_low` = 1 here.

    Args:
        ratio: ρ [samples, tokens], or [samples, 1].
        log_probs: log π [samples, tokens], with gradients.
        advantages: A [samples, tokens].
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.

    Returns:
        [samples, tokens]
    """
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * log_probs


def sapo_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, temperature_positive: float, temperature_negative: float
) -> torch.Tensor:
    """Return −4/τ σ(τ (ρ − 1)) A, with a gate that closes smoothly instead of a clip (SAPO, arXiv 2511.20347, eq. 5 and
    6).

    At ρ = 1 the gradient is that of −ρ A; far from it, it fades out as 1 / cosh²(τ (ρ − 1) / 2).

    Args:
        ratio: ρ [samples, tokens], or [samples, 1], with gradients.
        advantages: A [samples, tokens].
        temperature_positive: τ where A is positive, above 0.
        temperature_negative: τ elsewhere, above 0.

    Returns:
        [samples, tokens]
    """
    negative = torch.full_like(advantages, temperature_negative)
    temperature = torch.where(advantages > 0, temperature_positive, negative)
    return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float | None
) -> torch.Tensor:
    """Return ½ max((V − R)², (clip(V, V_old ± c) − R)²), the clipped regression of PPO's reference implementation.

    Args:
        values: V [samples, tokens], with gradients.
        old_values: the critic's values that the advantages were estimated with.
        returns: R, the targets.
        value_clip: c; the plain ½ (V − R)² if None.

    Returns:
        [samples, tokens]
    """
    loss = (values - returns).square()
    if value_clip is not None:
        kept = old_values + (values - old_values).clamp(-value_clip, value_clip)
        loss = torch.maximum(loss, (kept - returns).square())
    return loss / 2
