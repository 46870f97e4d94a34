"""The metrics of a chunk of groups, as sums and counts. `rewards.scoring` makes those of the rewards.

The control plane adds up the metrics of a step's chunks; `api.metrics` names the results.
"""

import math
from collections.abc import Sequence

import torch

from rlhfless_functions.algorithms.kl import kl_estimate
from rlhfless_functions.api import GroupResult
from rlhfless_functions.api.metrics import ENDINGS, TOOL_ERRORS
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
    metrics |= _episode_metrics(samples)
    values = [value for sample in samples for value in sample.of_sampled(sample.values or [])]
    if values:
        metrics |= {"values/sum": math.fsum(values), "values/count": len(values)}
    return metrics


def _episode_metrics(samples: Sequence[PreparedSample]) -> dict[str, float]:
    """Return the metrics of a chunk's episodes; none without an environment."""
    episodes = [sample for sample in samples if sample.outcome is not None]
    if not episodes:
        return {}
    outcomes = [sample.outcome for sample in samples if sample.outcome is not None]
    metrics: dict[str, float] = {
        "environment/given/sum": sum(len(each.response_tokens) - each.sampled_tokens for each in episodes),
        "environment/given/count": len(episodes),
    }
    for name in ("turns", "seconds_away"):
        metrics[f"environment/{name}/sum"] = math.fsum(outcome[name] for outcome in outcomes)
        metrics[f"environment/{name}/count"] = len(outcomes)
    for ending in ENDINGS:
        metrics[f"environment/ended/{ending}/sum"] = sum(outcome["ended"] == ending for outcome in outcomes)
        metrics[f"environment/ended/{ending}/count"] = len(outcomes)
    for kind in TOOL_ERRORS:
        metrics[f"environment/errors/{kind}/count"] = sum(outcome["tool_errors"].get(kind, 0) for outcome in outcomes)
    metrics["environment/restarted/count"] = sum(outcome["restarted"] for outcome in outcomes)
    metrics["environment/dropped/count"] = sum(outcome["dropped"] for outcome in outcomes)
    return metrics
