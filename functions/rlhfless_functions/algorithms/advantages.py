"""Advantages: how much better a token was than expected.

`estimate_advantages` needs only one complete group, so preparation runs it while other groups still decode.
`normalize_batch` and `normalize_samples` need the whole step's batch, so the learner runs them, once, before cutting it
into minibatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from rlhfless_functions.algorithms.aggregation import masked
from rlhfless_functions.algorithms.kl import kl_estimate
from rlhfless_functions.settings import AlgorithmSettings

GROUP_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL. It limits how much a nearly constant group is amplified."""


@dataclass(frozen=True)
class Estimate:
    """The advantages of one group, before any normalisation over the batch."""

    advantages: torch.Tensor
    """float64 [samples, tokens]; 0 where the mask is False."""
    returns: torch.Tensor | None
    """Targets of the critic, float64 [samples, tokens]; None without a critic."""
    mask: torch.Tensor
    """bool [samples, tokens]: the mask that was given, False on the whole row of a sample that has no reward."""


def estimate_advantages(
    settings: AlgorithmSettings,
    rewards: Sequence[float | None],
    mask: torch.Tensor,
    *,
    terms: Sequence[tuple[float, Sequence[float | None]]] = (),
    log_probs: torch.Tensor | None = None,
    reference_log_probs: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> Estimate:
    """Estimate the advantages of the samples of one prompt.

    Args:
        settings: settings of the job.
        rewards: reward of each sample; None if unscorable, which excludes it from the baseline and from the loss.
        mask: bool [samples, tokens], True on response tokens, EOS included; right-padded.
        terms: weight, and numbers of each sample, of every reward; needed with `advantage_normalization:
            group_per_reward`.
        log_probs: of the policy that generated; needed with `kl.placement: reward`.
        reference_log_probs: of the reference; needed with `kl.placement: reward`.
        values: of the critic, at the states before each token; needed with `advantage: gae`.

    Raises:
        ValueError: a needed tensor is missing.
    """
    settings = settings.resolved()
    scorable = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool, device=mask.device)
    mask = mask & scorable[:, None]
    penalty = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    if settings.kl.coefficient > 0 and settings.kl.placement == "reward":
        if log_probs is None or reference_log_probs is None:
            raise ValueError("kl.placement: reward needs the log-probabilities of the policy and of the reference")
        distance = kl_estimate(log_probs.double(), reference_log_probs.double(), settings.kl.estimator)
        penalty = settings.kl.coefficient * masked(distance, mask)
    if settings.advantage == "gae":
        if values is None:
            raise ValueError("advantage: gae needs the critic's values")
        advantages, returns = generalized_advantages(
            token_rewards(rewards, penalty, mask), values.double(), mask, settings.gamma, settings.gae_lambda
        )
        return Estimate(advantages, returns, mask)
    if settings.advantage == "discounted":
        return Estimate(discounted_returns(token_rewards(rewards, penalty, mask), mask, settings.gamma), None, mask)
    if settings.advantage_normalization == "group_per_reward":
        per_sample = per_reward_advantages(terms, scorable)
        return Estimate(masked(per_sample[:, None], mask), None, mask)
    # A response has one advantage here, so its penalty is summed up, as TRL's RLOO does.
    totals = [
        None if reward is None else reward - paid
        for reward, paid in zip(rewards, penalty.sum(-1).tolist(), strict=True)
    ]
    per_sample = group_advantages(
        totals, leave_one_out=settings.advantage == "leave_one_out", scale=settings.advantage_normalization == "group"
    ).to(mask.device)
    return Estimate(masked(per_sample[:, None], mask), None, mask)


def per_reward_advantages(
    terms: Sequence[tuple[float, Sequence[float | None]]], scorable: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each reward's own advantages in the group, before the batch's normalisation (GDPO,
    arXiv 2601.05242, eq. 4 to 6). Responses with equal sums of rewards but different terms get different advantages.

    As in TRL's `normalize_then_sum`, a reward that did not score a sample adds nothing to it, and its mean and standard
    deviation do not count the sample.

    Args:
        terms: weight, and numbers of each sample, of every reward.
        scorable: bool [samples]; the others get 0 and count nowhere.

    Returns:
        float64 [samples].
    """
    total = torch.zeros(len(scorable), dtype=torch.float64, device=scorable.device)
    for weight, numbers in terms:
        counted = [number if kept else None for number, kept in zip(numbers, scorable.tolist(), strict=True)]
        total += weight * group_advantages(counted, leave_one_out=False, scale=True).to(total.device)
    return total


def group_advantages(rewards: Sequence[float | None], *, leave_one_out: bool, scale: bool) -> torch.Tensor:
    """Return the reward minus the group's mean (GRPO, arXiv 2402.03300) or minus the mean of the others (RLOO, arXiv
    2402.14740).

    A constant group always gives exact zeros: rewards are first shifted by one of them, because the division would
    amplify a rounding error of the mean (NeMo-RL issue 4161). The standard deviation is that of a sample (n − 1), from
    a second pass, as in TRL.

    Args:
        rewards: rewards of the group's samples; None does not count in mean and standard deviation.
        leave_one_out: which of the two baselines.
        scale: divide by the group's standard deviation + `GROUP_EPSILON`.

    Returns:
        float64 [samples]; 0 where the reward is None, or is the group's only one.
    """
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    scorable = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool)
    scores = torch.tensor([reward for reward in rewards if reward is not None], dtype=torch.float64)
    count = len(scores)
    if count < 2:
        return advantages
    shifted = scores - scores[0]
    centred = shifted - shifted.mean()
    # r_i − (Σ r − r_i) / (n − 1) = (r_i − mean) n / (n − 1)
    group = centred * (count / (count - 1)) if leave_one_out else centred
    if scale:
        group = group / ((centred.square().sum() / (count - 1)).sqrt() + GROUP_EPSILON)
    advantages[scorable] = group
    return advantages


def token_rewards(rewards: Sequence[float | None], penalty: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return rewards per token: minus the penalty at each, and the sample's reward at its last (arXiv 2203.02155).

    Args:
        rewards: of each sample; None counts as 0 (its row is masked).
        penalty: the weighted KL estimate of each token [samples, tokens].
        mask: bool [samples, tokens], True on response tokens; right-padded.

    Returns:
        Same shape and type as the penalty; 0 where the mask is False.
    """
    scores = torch.tensor([reward or 0.0 for reward in rewards], dtype=penalty.dtype, device=penalty.device)
    position = torch.arange(mask.shape[1], device=mask.device)
    last = mask & (position == mask.sum(-1, keepdim=True) - 1)
    return masked(-penalty, mask) + masked(scores[:, None], last)


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16), with value 0 after the last token.

    Args:
        rewards: per token [samples, tokens].
        values: V of the state before each token, same shape.
        mask: bool, True on response tokens; right-padded.
        gamma: discount per token.
        gae_lambda: λ.

    Returns:
        Advantages, and the critic's targets (advantages + values); both 0 where the mask is False.
    """
    rewards, values = masked(rewards, mask), masked(values, mask)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=-1)
    advantages = _discounted_sums(rewards + gamma * following - values, gamma * gae_lambda)
    return masked(advantages, mask), masked(advantages + values, mask)


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return Σ over k ≥ t of γ^(k − t) r_k, the advantage of REINFORCE++ before normalisation (arXiv 2501.03262, eq.
    10).

    Args:
        rewards: per token [samples, tokens].
        mask: bool, True on response tokens; right-padded.
        gamma: discount per token.

    Returns:
        Same shape; 0 where the mask is False.
    """
    return masked(_discounted_sums(masked(rewards, mask), gamma), mask)


def _discounted_sums(terms: torch.Tensor, discount: float) -> torch.Tensor:
    # Each round doubles the reach of a sum, so a long response costs log₂(tokens) rounds instead of one per token.
    reach = 1
    while reach < terms.shape[1]:
        terms = terms + discount**reach * functional.pad(terms[:, reach:], (0, reach))
        reach *= 2
    return terms


def normalize_batch(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and standard deviation 1 over all tokens of the batch that count ("whitening").

    (A − mean) / √(variance + 1e-8) with the sample variance (n − 1), as in TRL's and verl's `masked_whiten`, but in two
    passes in float64: equal advantages give exact zeros.

    Args:
        advantages: of the whole step's batch [samples, tokens].
        mask: bool, True on tokens that count.

    Returns:
        Same shape and type; 0 where the mask is False, and everywhere if no token counts.
    """
    chosen = advantages[mask].double()
    if not len(chosen):
        return torch.zeros_like(advantages)
    centred, variance = _centred(chosen)
    whitened = (centred * torch.rsqrt(variance + 1e-8)).to(advantages.dtype)
    return torch.zeros_like(advantages).masked_scatter(mask, whitened)


def normalize_samples(advantages: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Mean 0 and standard deviation 1 over all samples of the batch that have a reward, however long they are.

    (A − mean) / (deviation + `GROUP_EPSILON`), as TRL's `normalize_then_sum` (GDPO) and NeMo-RL whiten. The advantages
    of each group sum to 0, and therefore a group of equal rewards keeps advantages of 0, whatever other groups have.

    Args:
        advantages: one of each sample of the whole step's batch [samples].
        scored: bool [samples], True on samples that have a reward.

    Returns:
        Same shape and type; 0 where a sample has no reward.
    """
    chosen = advantages[scored].double()
    if not len(chosen):
        return torch.zeros_like(advantages)
    centred, variance = _centred(chosen)
    whitened = (centred / (variance.sqrt() + GROUP_EPSILON)).to(advantages.dtype)
    return torch.zeros_like(advantages).masked_scatter(scored, whitened)


def _centred(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers minus their mean, and their sample variance (n − 1). Equal numbers give exact zeros."""
    shifted = numbers - numbers[0]
    centred = shifted - shifted.mean()
    return centred, centred.square().sum() / max(len(numbers) - 1, 1)
