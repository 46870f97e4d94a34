"""Importance ratios: the policy against the old policy, and the trainer against the sampler."""

import math

import pytest
import torch

from rlhfless_functions.algorithms.ratios import (
    clipped_geometric_mean,
    correction_weights,
    importance_ratio,
    sampler_ratio,
)
from rlhfless_functions.settings import ImportanceSamplingSettings

torch.set_num_threads(1)

MASK = torch.tensor([[True, True, True], [True, True, False]])
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, torch.nan]], dtype=torch.float64)
NEW = torch.tensor([[-1.2, -1.5, -0.4], [-0.3, -2.0, torch.inf]], dtype=torch.float64)


def test_ratio_of_each_token() -> None:
    ratio = importance_ratio(NEW, OLD, MASK, "token")
    expected = [[math.exp(-0.2), math.exp(0.5), math.exp(0.1)], [math.exp(-0.2), math.exp(1.0), 1.0]]
    assert ratio.tolist() == [pytest.approx(row) for row in expected]


def test_ratio_of_a_sequence_is_the_geometric_mean_over_its_own_tokens() -> None:
    ratio = importance_ratio(NEW, OLD, MASK, "sequence")
    assert ratio.tolist() == [[pytest.approx(math.exp(0.4 / 3))], [pytest.approx(math.exp(0.8 / 2))]]


def test_ratio_of_a_response_as_one_action_is_the_product() -> None:
    ratio = importance_ratio(NEW, OLD, MASK, "sequence_product")
    assert ratio.tolist() == [[pytest.approx(math.exp(0.4))], [pytest.approx(math.exp(0.8))]]


@pytest.mark.parametrize(
    ("level", "share"), [("token", [1, 1, 1]), ("sequence", [1 / 3] * 3), ("sequence_product", [1, 1, 1])]
)
def test_gradient_at_equal_policies(level: str, share: list[float]) -> None:
    """At ratio 1 each log-probability's gradient is its share of the exponent, and padding has none."""
    leaf = torch.zeros(1, 4, requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    importance_ratio(leaf, torch.zeros(1, 4), mask, level).masked_fill(~mask[:, :1], 0).sum().backward()
    assert leaf.grad.tolist() == [pytest.approx([*share, 0.0])]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_product"])
def test_a_vanished_probability_gives_finite_ratios_and_gradients(level: str) -> None:
    leaf = torch.tensor([[-1e4, 0.0]], requires_grad=True)
    ratio = importance_ratio(leaf, torch.tensor([[0.0, -1e4]]), torch.ones(1, 2, dtype=torch.bool), level)
    ratio.sum().backward()
    assert ratio.isfinite().all() and leaf.grad.isfinite().all()


def test_a_fully_masked_sample_has_ratio_one() -> None:
    mask = torch.zeros(1, 3, dtype=torch.bool)
    assert importance_ratio(NEW[:1], OLD[:1], mask, "sequence").tolist() == [[1.0]]


def test_sampler_ratio_is_detached_and_truncated_from_above_only_unless_there_is_a_lower_bound() -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], requires_grad=True)
    sampler = torch.tensor([[-1.0, -3.0, -0.5, torch.nan]])
    ratio = sampler_ratio(old, sampler, torch.tensor([[True, True, True, False]]))
    assert not ratio.requires_grad
    assert ratio.tolist() == [pytest.approx([1.0, math.exp(2), math.exp(-0.5), 1.0])]
    weights = correction_weights(ratio, ImportanceSamplingSettings(high=2.0))
    assert weights.tolist() == [pytest.approx([1.0, 2.0, math.exp(-0.5), 1.0])]
    weights = correction_weights(ratio, ImportanceSamplingSettings(low=0.8, high=2.0))
    assert weights.tolist() == [pytest.approx([1.0, 2.0, 0.8, 1.0])]


def test_masked_weights_are_the_ratio_within_the_bounds_which_belong_to_it_and_zero_outside() -> None:
    ratio = torch.tensor([[0.4, 0.5, 1.0, 5.0, 5.1, 1e8]])
    both = ImportanceSamplingSettings(mode="mask", low=0.5, high=5.0)
    assert correction_weights(ratio, both).tolist() == [[0.0, 0.5, 1.0, 5.0, 0.0, 0.0]]
    above_alone = ImportanceSamplingSettings(mode="mask", high=5.0)
    assert correction_weights(ratio, above_alone).tolist() == [[pytest.approx(0.4), 0.5, 1.0, 5.0, 0.0, 0.0]]


def test_sampler_ratio_of_a_response_is_the_product_or_the_geometric_mean_of_its_tokens() -> None:
    product = sampler_ratio(NEW, OLD, MASK, "sequence_product")
    assert product.tolist() == [[pytest.approx(math.exp(0.4))], [pytest.approx(math.exp(0.8))]]
    mean = sampler_ratio(NEW, OLD, MASK, "geometric_mean")
    assert mean.tolist() == [[pytest.approx(math.exp(0.4 / 3))], [pytest.approx(math.exp(0.8 / 2))]]


@pytest.mark.parametrize(
    ("advantage", "log_mean", "slopes"),
    [(1.0, (-1.0 + 0.1 + 0.4) / 3, [1, 1, 0]), (-1.0, (-0.4 + 0.1 + 2.0) / 3, [0, 1, 1])],
)
def test_each_token_is_clipped_on_the_side_of_the_advantage_before_the_geometric_mean(
    advantage: float, log_mean: float, slopes: list[int]
) -> None:
    leaf = torch.tensor([[-1.0, 0.1, 2.0, 7.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    low, high = 1 - math.exp(-0.4), math.exp(0.4) - 1
    mean = clipped_geometric_mean(leaf, torch.zeros_like(leaf), torch.full((1, 4), advantage), mask, low, high)
    assert mean.item() == pytest.approx(math.exp(log_mean))
    mean.backward()
    assert leaf.grad.tolist() == [pytest.approx([math.exp(log_mean) / 3 * slope for slope in slopes] + [0])]


def expected_ratio(trainer: torch.Tensor, sampler: torch.Tensor) -> float:
    """Mean of the sampler ratio over what the sampler samples, by summing over the vocabulary."""
    mask = sampler > 0
    return (sampler * sampler_ratio(trainer.log(), sampler.log(), mask))[mask].sum().item()


def test_mean_sampler_ratio_tells_temperature_and_nucleus_apart_from_numerics() -> None:
    """Mean 1 for any sampler that covers the vocabulary; 0.9 for a nucleus of 0.9, hence no top-p setting."""
    logits = torch.tensor([2.0, 1.0, 0.0, -0.5, -1.0], dtype=torch.float64)
    trainer = torch.softmax(logits, -1)
    jittered = torch.softmax(logits + torch.tensor([0.01, -0.02, 0.0, 0.01, 0.03]), -1)
    assert expected_ratio(trainer, jittered) == pytest.approx(1.0, abs=1e-12)
    nucleus = torch.where(trainer.cumsum(-1) - trainer < 0.9, trainer, 0.0)
    kept = nucleus.sum().item()
    assert 0.9 <= kept < 0.96
    assert expected_ratio(trainer, nucleus / kept) == pytest.approx(kept, abs=1e-12)


def test_temperature_on_both_sides_gives_ratio_one_and_on_one_side_does_not() -> None:
    logits = torch.tensor([[2.0, 0.3, -1.0]])
    tempered = torch.log_softmax(logits / 0.6, -1)
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    assert sampler_ratio(tempered, tempered.clone(), everywhere).tolist() == [[1.0, 1.0, 1.0]]
    forgotten = sampler_ratio(torch.log_softmax(logits, -1), tempered, everywhere)
    assert (forgotten - 1).abs().min() > 0.1
