"""Advantages of prepared samples: preparation estimates them, or the learner with the values of its own critic."""

from collections.abc import Sequence

import torch

from rlhfless_functions.algorithms.advantages import Estimate, estimate_advantages
from rlhfless_functions.data.rollouts import PreparedSample
from rlhfless_functions.settings import AlgorithmSettings, RewardSettings


def estimate_samples(
    samples: Sequence[PreparedSample], algorithm: AlgorithmSettings, rewards: Sequence[RewardSettings] = ()
) -> Estimate:
    """Estimate the advantages of scored samples, before any normalisation over the batch.

    Args:
        samples: those of one prompt; with a critic, any samples, and each has its values.
        algorithm: settings of the job.
        rewards: the job's, for their weights; needed with `advantage_normalization: group_per_reward`.

    Returns:
        A row for each sample with a number for each sampled token, as long as the longest. Its numbers do not depend on
        the other rows' lengths.

    Raises:
        ValueError: samples lack values or log-probabilities that the algorithm needs.
    """
    lengths = [sample.sampled_tokens for sample in samples]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return estimate_advantages(
        algorithm,
        [sample.reward for sample in samples],
        mask,
        terms=[
            (reward.weight, [(sample.reward_terms or {}).get(reward.name) for sample in samples]) for reward in rewards
        ],
        log_probs=_padded(samples, [sample.old_log_probs or sample.log_probs for sample in samples]),
        reference_log_probs=_padded(samples, [sample.reference_log_probs for sample in samples]),
        values=_padded(samples, [sample.values for sample in samples]),
    )


def _padded(samples: Sequence[PreparedSample], numbers: Sequence[list[float] | None]) -> torch.Tensor | None:
    """Return float64 [samples, longest], right-padded with 0; None if any row is None."""
    present = [sample.of_sampled(row) for sample, row in zip(samples, numbers, strict=True) if row is not None]
    if len(present) < len(numbers):
        return None
    width = max(map(len, present))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in present], dtype=torch.float64)
