"""The metrics of a chunk of groups, as sums and counts. `rewards.scoring` makes those of the rewards.

The control plane adds up the metrics of a step's chunks; `api.metrics` names the results.
"""

import math
from collections.abc import Sequence

import torch

from rlhfless_functions.algorithms.kl import kl_estimate
from rlhfless_functions.api import GroupResult
from rlhfless_functions.data.rollouts import PreparedSample


def chunk_metrics(
    prompt_lengths: Sequence[int], samples: Sequence[PreparedSample], results: Sequence[GroupResult]
) -> dict[str, float]:
    """Return the metrics that come from the prepared samples of a chunk.

    Args:
        prompt_lengths: tokens of each group's prompt.
        samples: prepared samples of all groups.
        results: one per group.
    """
    metrics: dict[str, float] = {
        "groups/count": len(results),
        "zero_variance_groups/count": sum(result.reward is not None and result.spread == 0 for result in results),
        "lengths/sum": sum(sample.sampled_tokens for sample in samples),
        "lengths/count": len(samples),
        "prompt_lengths/sum": sum(prompt_lengths),
        "prompt_lengths/count": len(results),
        "truncated/sum": sum(sample.finish_reason == "truncated" for sample in samples),
        "truncated/count": len(samples),
        "masked/count": sum(not sample.mask for sample in samples),
    }
    ours: list[float] = []
    theirs: list[float] = []
    for sample in samples:
        if sample.reference_log_probs is not None:
            ours += sample.of_sampled(sample.old_log_probs or sample.log_probs)
            theirs += sample.of_sampled(sample.reference_log_probs)
    if ours:
        distance = kl_estimate(torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64), "k3")
        metrics |= {"kl/reference/sum": float(distance.sum()), "kl/reference/count": len(ours)}
    values = [value for sample in samples for value in sample.of_sampled(sample.values or [])]
    if values:
        metrics |= {"values/sum": math.fsum(values), "values/count": len(values)}
    return metrics
