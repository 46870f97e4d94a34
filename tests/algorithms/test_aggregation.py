"""The mean of a batch does not depend on how the batch was cut into micro-batches or spread over ranks."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.algorithms.aggregation import Aggregation, aggregate, masked, normalizer

torch.set_num_threads(1)

LONGEST = 12
aggregations = st.sampled_from(get_args(Aggregation))
lengths_of_samples = st.lists(st.integers(0, LONGEST), min_size=1, max_size=16)


def mask_of(lengths: list[int], width: int = LONGEST) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


@given(lengths=lengths_of_samples, aggregation=aggregations, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_value_is_the_mean_that_is_meant(lengths: list[int], aggregation: Aggregation, seed: int) -> None:
    losses = torch.randn(len(lengths), LONGEST, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours = aggregate(losses, mask_of(lengths), aggregation) / normalizer(lengths, aggregation, LONGEST)
    rows = [row[:length] for row, length in zip(losses.tolist(), lengths, strict=True) if length]
    if not rows:
        expected = 0.0
    elif aggregation == "token-mean":
        expected = sum(map(sum, rows)) / sum(map(len, rows))
    elif aggregation == "seq-mean-token-mean":
        expected = sum(sum(row) / len(row) for row in rows) / len(rows)
    else:
        expected = sum(sum(row) / LONGEST for row in rows) / len(lengths)
    assert ours.item() == pytest.approx(expected, abs=1e-12)


@given(
    lengths=lengths_of_samples,
    aggregation=aggregations,
    size=st.sampled_from([1, 2, 8]),
    ranks=st.sampled_from([1, 2]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=80, deadline=None)
def test_any_cut_into_micro_batches_and_ranks_gives_the_same_gradient(
    lengths: list[int], aggregation: Aggregation, size: int, ranks: int, order: object
) -> None:
    weights = torch.randn(LONGEST, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    features = torch.randn(len(lengths), LONGEST, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask, divisor = mask_of(lengths), normalizer(lengths, aggregation, LONGEST)

    def gradient(rows: list[int]) -> torch.Tensor:
        leaf = weights.clone().requires_grad_()
        longest = max(1, *(lengths[row] for row in rows), 1)  # a micro-batch is only as wide as it must be
        per_token = torch.tanh(features[rows] * leaf)[:, :longest]
        (aggregate(per_token, mask[rows][:, :longest], aggregation) / divisor).backward()
        return leaf.grad

    rows = list(range(len(lengths)))
    whole = gradient(rows)
    order.shuffle(rows)
    parts = torch.zeros(LONGEST, dtype=torch.float64)
    for rank in range(ranks):
        own = rows[rank::ranks]
        for start in range(0, len(own), size):
            parts += gradient(own[start : start + size])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


def test_token_mean_is_no_mean_of_means() -> None:
    """100 tokens at 0.5 and 900 at 0.3 have a mean of 0.32; the mean of the two means would be 0.4."""
    short, long = torch.full((1, 100), 0.5), torch.full((9, 100), 0.3)
    divisor = normalizer([100] * 10, "token-mean", 100)
    total = sum(aggregate(part, torch.ones_like(part, dtype=torch.bool), "token-mean") for part in (short, long))
    assert total.item() / divisor == pytest.approx(0.32)


def test_fully_masked_rows_count_where_the_divisor_is_a_constant() -> None:
    """Dr. GRPO's: else a step with many masked samples would weigh the others more."""
    assert normalizer([5, 0, 12, 0], "seq-mean-token-sum-norm", LONGEST) == 4 * LONGEST
    assert normalizer([5, 7, 12, 9], "seq-mean-token-sum-norm", LONGEST) == 4 * LONGEST


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_fully_masked_rows_are_as_if_they_were_not_there(aggregation: Aggregation) -> None:
    losses = torch.randn(4, LONGEST, generator=torch.Generator().manual_seed(3))
    lengths = [5, 0, 12, 0]
    kept = [0, 2]
    with_them = aggregate(losses, mask_of(lengths), aggregation) / normalizer(lengths, aggregation, LONGEST)
    without = aggregate(losses[kept], mask_of([5, 12]), aggregation) / normalizer([5, 12], aggregation, LONGEST)
    torch.testing.assert_close(with_them, without)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_a_batch_without_any_token_has_a_loss_and_a_gradient_of_zero(aggregation: Aggregation) -> None:
    losses = torch.full((2, 3), torch.nan, requires_grad=True)
    loss = aggregate(losses, torch.zeros(2, 3, dtype=torch.bool), aggregation) / normalizer([0, 0], aggregation, 3)
    loss.backward()
    assert loss.item() == 0 and not losses.grad.any()


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_a_loss_per_sample_counts_at_each_of_its_tokens(aggregation: Aggregation) -> None:
    mask = mask_of([3, 7])
    per_sample = torch.tensor([[1.5], [-2.0]])
    torch.testing.assert_close(
        aggregate(per_sample, mask, aggregation), aggregate(per_sample.expand(mask.shape), mask, aggregation)
    )


def test_what_stands_in_padding_reaches_neither_value_nor_gradient() -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    mask = torch.tensor([True, False, False])
    result = masked(values.exp(), mask).sum()
    result.backward()
    assert result.item() == pytest.approx(2.718281828)
    assert masked(values.detach(), mask).tolist() == [1, 0, 0]
