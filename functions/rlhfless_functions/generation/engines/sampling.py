"""Drawing one token a row from logits, with its log-probability."""

import torch

SUM_BYTES = 1 << 28
"""Most memory for the cumulative sums of the rows that are drawn together, unless one row takes more."""
_BYTES_PER_TOKEN = 20
"""Bytes for each token of the vocabulary while a row is summed: its probability in float32, and in float64 a copy of
that and the sum."""


def draw(
    logits: torch.Tensor, temperature: float, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample by inverting the cumulative distribution, with one random number a row; or take the likeliest tokens.

    Log-probabilities are a float32 log-softmax of logits / temperature, as the trainer computes them. The cumulative
    sum is in float64, because rounding in float32 could lose tokens of a large vocabulary.

    Args:
        logits: [n, vocabulary], any floating dtype.
        temperature: 0 takes the likeliest token, and log-probabilities are then those at 1.
        uniforms: [n] float64 in [0, 1).

    Returns:
        Tokens [n] int64, their log-probabilities [n] float32, and whether the row is a valid distribution [n] bool.
        Ignore the token and log-probability of an invalid row.
    """
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    tokens, sound = choose(log_probs, uniforms) if temperature else likeliest(log_probs)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0], sound


def choose(log_probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row from log-probabilities.

    Sums over a large vocabulary take several times the memory of the logits, so a few rows are summed at a time.

    Args:
        log_probs: [n, vocabulary] float32.
        uniforms: [n] float64 in [0, 1).

    Returns:
        Tokens [n] int64, and whether the row is a valid distribution [n] bool.
    """
    rows = max(1, SUM_BYTES // (_BYTES_PER_TOKEN * log_probs.shape[-1]))
    parts = [_choose(*each) for each in zip(log_probs.split(rows), uniforms.split(rows), strict=True)]
    if len(parts) == 1:
        return parts[0]
    tokens, sound = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(sound)


def _choose(log_probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cumulative = torch.cumsum(log_probs.exp(), dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # The first token whose cumulative probability is above the target. A token of probability zero is never chosen.
    tokens = torch.searchsorted(cumulative, (uniforms * total)[:, None], right=True)
    return tokens.clamp_(max=log_probs.shape[-1] - 1)[:, 0], torch.isfinite(total)


def likeliest(log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest token of each row. Of equally likely tokens, every engine takes the first.

    Args:
        log_probs: [n, vocabulary] float32.

    Returns:
        Tokens [n] int64, and whether the row is a valid distribution [n] bool.
    """
    greatest, tokens = log_probs.max(dim=-1)
    return tokens, torch.isfinite(greatest)
