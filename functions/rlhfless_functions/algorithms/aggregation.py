"""Aggregate losses per token to one number that does not depend on the division into micro-batches.

A mean of means would weigh the tokens of short micro-batches more. So every micro-batch on every rank contributes a
plain sum. One normaliser, determined by the lengths of the whole optimizer step, divides all of them.
"""

from collections.abc import Sequence
from typing import Literal

import torch

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` with exact zeros and zero gradients where `mask` is False, even in place of NaN."""
    return torch.where(mask, values, 0.0)


def aggregate(per_token: torch.Tensor, mask: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    """Return the part of one micro-batch in the loss, before division by the `normalizer` of its optimizer step.

    Args:
        per_token: losses [samples, tokens], or [samples, 1] where a sample has the same loss at each token.
        mask: bool [samples, tokens], True on tokens that count; a row without any contributes nothing.
        aggregation: the kind of mean.

    Returns:
        A scalar, the unnormalised sum.
    """
    terms = masked(per_token, mask)
    if aggregation == "seq-mean-token-mean":
        return (terms.sum(-1) / mask.sum(-1).clamp(min=1)).sum()
    return terms.sum()


def normalizer(lengths: Sequence[int], aggregation: Aggregation, longest_response: int) -> float:
    """Return the divisor of the sums of `aggregate` over all micro-batches and ranks of an optimizer step.

    Args:
        lengths: number of tokens that count of every sample of the optimizer step; 0 for samples excluded from the
            loss.
        aggregation: `token-mean`: all tokens (DAPO, arXiv 2503.14476). `seq-mean-token-mean`: samples (GRPO, arXiv
            2402.03300). `seq-mean-token-sum-norm`: samples times the longest response allowed (Dr. GRPO, arXiv
            2503.20783). That is a constant, so samples without a token count there, as in TRL, and nowhere else.
        longest_response: `sampling.max_response_tokens`.

    Returns:
        The normaliser; 1 if no token counts, since the sums are then 0.
    """
    if aggregation == "token-mean":
        total = sum(lengths)
    elif aggregation == "seq-mean-token-mean":
        total = sum(length > 0 for length in lengths)
    else:
        total = len(lengths) * longest_response
    return float(max(total, 1))
