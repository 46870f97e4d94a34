"""The losses of a micro-batch, composed from the parts that an algorithm's settings choose."""

from dataclasses import dataclass

import torch

from rlhfless_functions.algorithms.aggregation import aggregate, masked
from rlhfless_functions.algorithms.diagnostics import (
    Statistics,
    correction_statistics,
    critic_statistics,
    policy_statistics,
    rejection_statistics,
)
from rlhfless_functions.algorithms.kl import kl_loss
from rlhfless_functions.algorithms.losses import cispo_loss, ppo_loss, sapo_loss, value_loss
from rlhfless_functions.algorithms.ratios import (
    clipped_geometric_mean,
    correction_weights,
    importance_ratio,
    kept,
    sampler_ratio,
)
from rlhfless_functions.settings import AlgorithmSettings, ImportanceSamplingSettings


@dataclass(frozen=True)
class Loss:
    """One micro-batch's part of a loss."""

    total: torch.Tensor
    """A scalar with gradients: divide it by the `normalizer` of the optimizer step, then call `backward`."""
    statistics: Statistics
    """Statistics, which add up over micro-batches."""


def policy_loss(
    settings: AlgorithmSettings,
    *,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    entropy: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    sampler_log_probs: torch.Tensor | None = None,
    reference_log_probs: torch.Tensor | None = None,
) -> Loss:
    """Return the policy's loss on one micro-batch: clipped objective × importance weight + KL − entropy bonus.

    With the defaults this is decoupled PPO (Hilton et al., arXiv 2110.00641, eq. 4; AReaL, arXiv 2505.24298, eq. 5): −w
    min(r A, clip(r) A) with r = π / π_prox and w = π_prox / μ, where π_prox is the learner's policy as the step began,
    recomputed by the learner, and μ is the policy that sampled the token. `proximal_policy: sampler` replaces π_prox by
    μ: r = π / μ is clipped, and w = 1.

    Tensors are [samples, tokens]; values where the mask is False have no influence, even NaN.

    Args:
        settings: of the job.
        log_probs: of the sampled tokens under the policy, with gradients.
        advantages: normalised over the batch already, where the settings say so.
        mask: bool, True on tokens that count.
        entropy: of the policy's distribution at each token, in nats; with gradients if there is an entropy bonus.
        old_log_probs: under the policy that the step started from; `log_probs` themselves, detached, if None, which is
            right in the step's first optimizer update.
        sampler_log_probs: as the engine reported them; no importance weights if None.
        reference_log_probs: under the reference; needed with a KL penalty in the loss.

    Raises:
        ValueError: if a needed tensor is missing.
    """
    settings = settings.resolved()
    log_probs, advantages = masked(log_probs, mask), masked(advantages, mask)
    old = log_probs.detach() if old_log_probs is None else masked(old_log_probs, mask)
    corrected: Statistics = {}
    if settings.proximal_policy == "sampler":
        if sampler_log_probs is None:
            raise ValueError("proximalPolicy: sampler needs the sampler's log-probabilities")
        proximal = masked(sampler_log_probs, mask)
        per_token, ratio = _surrogate(settings, log_probs, proximal, advantages, mask)
    else:
        per_token, ratio = _surrogate(settings, log_probs, old, advantages, mask)
        if sampler_log_probs is not None:
            per_token, corrected = _correct(per_token, old, sampler_log_probs, mask, settings.importance_sampling)
    if settings.kl.coefficient > 0 and settings.kl.placement == "loss":
        if reference_log_probs is None:
            raise ValueError("kl.placement: loss needs the log-probabilities of the reference")
        token_ratio = importance_ratio(log_probs, old, mask, "token")
        reference = masked(reference_log_probs, mask)
        per_token = per_token + settings.kl.coefficient * kl_loss(
            log_probs, reference, token_ratio, settings.kl.estimator
        )
    if settings.entropy_coefficient > 0:
        if entropy is None:
            raise ValueError("entropyCoefficient needs the entropy of the policy")
        per_token = per_token - settings.entropy_coefficient * masked(entropy, mask)
    statistics = policy_statistics(
        log_probs,
        old,
        ratio,
        advantages,
        mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        entropy=entropy,
        sampler_log_probs=sampler_log_probs,
        reference_log_probs=reference_log_probs,
    )
    return Loss(aggregate(per_token, mask, settings.aggregation), statistics | corrected)


def _surrogate(
    settings: AlgorithmSettings,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the policy term per token, and the ratio that is clipped in it: [samples, tokens], or [samples, 1]."""
    low, high = settings.clip_low, settings.clip_high
    if settings.clip == "gmpo":
        mean = clipped_geometric_mean(log_probs, old_log_probs, advantages, mask, low, high)
        return -mean * advantages, importance_ratio(log_probs, old_log_probs, mask, "token")
    ratio = importance_ratio(log_probs, old_log_probs, mask, settings.ratio_level)
    if settings.clip == "cispo":
        return cispo_loss(ratio, log_probs, advantages, low, high), ratio
    if settings.clip == "sapo":
        temperatures = settings.sapo_temperature_positive, settings.sapo_temperature_negative
        return sapo_loss(ratio, advantages, *temperatures), ratio
    return ppo_loss(ratio, advantages, low, high, settings.dual_clip), ratio


def _correct(
    per_token: torch.Tensor,
    old_log_probs: torch.Tensor,
    sampler_log_probs: torch.Tensor,
    mask: torch.Tensor,
    correction: ImportanceSamplingSettings,
) -> tuple[torch.Tensor, Statistics]:
    """Return the policy term with importance weights and without rejected tokens, and the statistics of both."""
    corrected: Statistics = {}
    if correction.mode != "none":
        ratio = sampler_ratio(old_log_probs, sampler_log_probs, mask, correction.level)
        per_token = per_token * correction_weights(ratio, correction)
        corrected = correction_statistics(ratio, mask, correction)
    if (rejection := correction.rejection) is not None:
        stays = kept(sampler_ratio(old_log_probs, sampler_log_probs, mask, rejection.level), rejection)
        per_token = per_token * stays
        corrected = corrected | rejection_statistics(stays, mask)
    return per_token, corrected


def critic_loss(
    settings: AlgorithmSettings,
    *,
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
) -> Loss:
    """Return the critic's loss on one micro-batch. It is aggregated like the policy's, and uses the same normaliser.

    Tensors are [samples, tokens]; values where the mask is False have no influence, even NaN.

    Args:
        settings: of the job.
        values: under the critic now, with gradients.
        old_values: those that the advantages were estimated with.
        returns: targets.
        mask: bool, True on tokens that count.
    """
    settings = settings.resolved()
    value_clip = None if settings.critic is None else settings.critic.value_clip
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    return Loss(
        aggregate(value_loss(values, old_values, returns, value_clip), mask, settings.aggregation),
        critic_statistics(values, old_values, returns, mask, value_clip),
    )
