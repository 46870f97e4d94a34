"""Decoupled PPO: the proximal and the behaviour policy apart, with weights and rejections of every kind.

The expected losses are AReaL's `ppo_actor_loss_fn` with its `apply_rejection_sampling` (areal/utils/functional/
functional.py, commit 2274616), and NeMo-RL's seq-mask-tis, written down once more token by token. AReaL's own code is
compared with by `benchmarks/peers/correctness.py --areal`.
"""

from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless_functions.algorithms.diagnostics import summarize
from rlhfless_functions.algorithms.objectives import policy_loss
from rlhfless_functions.settings import AlgorithmSettings, ImportanceSamplingSettings
from tests.algorithms.test_losses_against_trl import our_loss, random_batch

torch.set_num_threads(1)

CLIP = 0.2


def decoupled(batch: SimpleNamespace, weights: Any) -> float:
    """Σ −w min(r A, clip(r) A) / tokens, with r = π / π_prox of each token.

    Args:
        batch: see `random_batch`.
        weights: (log ratios of a response's tokens) → the weight of each, 0 where it is masked.
    """
    total = 0.0
    for row, length in enumerate(batch.lengths):
        advantage = batch.advantages[row].item()
        behaviour = (batch.old - batch.sampler)[row, :length].tolist()
        moved = (batch.log_probs - batch.old)[row, :length].tolist()
        for weight, log_ratio in zip(weights(behaviour), moved, strict=True):
            ratio = exp(log_ratio)
            clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
            total -= weight * min(ratio * advantage, clipped * advantage)
    return total / sum(batch.lengths)


def mean(behaviour: list[float]) -> float:
    return exp(sum(behaviour) / len(behaviour))


def tokens_truncated(behaviour: list[float]) -> list[float]:
    return [min(exp(each), 1.3) for each in behaviour]


def tokens_masked(behaviour: list[float]) -> list[float]:
    return [exp(each) if log(0.7) <= each <= log(1.3) else 0.0 for each in behaviour]


def tokens_masked_and_not_weighed(behaviour: list[float]) -> list[float]:
    return [1.0 if log(0.7) <= each <= log(1.3) else 0.0 for each in behaviour]


def responses_truncated(behaviour: list[float]) -> list[float]:
    return [min(exp(sum(behaviour)), 2.0)] * len(behaviour)


def responses_masked(behaviour: list[float]) -> list[float]:
    weight = exp(sum(behaviour))
    return [weight if 0.5 <= weight <= 2.0 else 0.0] * len(behaviour)


def rejected_by_the_product(behaviour: list[float]) -> list[float]:
    return [mean(behaviour) if 0.5 <= exp(sum(behaviour)) <= 2.0 else 0.0] * len(behaviour)


def seq_mask_tis(behaviour: list[float]) -> list[float]:
    return tokens_truncated(behaviour) if 0.9 <= mean(behaviour) <= 1.1 else [0.0] * len(behaviour)


GEOMETRIC = {"level": "geometric_mean", "low": 0.9, "high": 1.1}
CORRECTIONS: list[tuple[Any, dict[str, Any]]] = [
    (tokens_truncated, {"high": 1.3}),
    (tokens_masked, {"mode": "mask", "low": 0.7, "high": 1.3}),
    (tokens_masked_and_not_weighed, {"mode": "none", "rejection": {"level": "token", "low": 0.7, "high": 1.3}}),
    (responses_truncated, {"level": "sequence_product", "high": 2.0}),
    (responses_masked, {"mode": "mask", "level": "sequence_product", "low": 0.5, "high": 2.0}),
    (
        rejected_by_the_product,
        {"level": "geometric_mean", "high": 1e9, "rejection": {"level": "sequence_product", "low": 0.5, "high": 2.0}},
    ),
    (seq_mask_tis, {"high": 1.3, "rejection": GEOMETRIC}),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("weights", "given"), CORRECTIONS, ids=[weights.__name__ for weights, _ in CORRECTIONS])
def test_the_loss_is_the_peers_formula(weights: Any, given: dict[str, Any], seed: int) -> None:
    batch = random_batch(seed)
    algorithm = AlgorithmSettings(importance_sampling=ImportanceSamplingSettings(**given))
    loss, _ = our_loss(algorithm, batch, sampler_log_probs=batch.sampler)
    assert loss.item() == pytest.approx(decoupled(batch, weights), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_with_the_sampler_as_the_proximal_policy_its_ratio_is_clipped_and_nothing_weighed(seed: int) -> None:
    batch = random_batch(seed)
    coupled, gradient = our_loss(AlgorithmSettings(proximal_policy="sampler"), batch, sampler_log_probs=batch.sampler)
    batch.old = batch.sampler
    assert coupled.item() == pytest.approx(decoupled(batch, lambda behaviour: [1.0] * len(behaviour)), rel=1e-12)
    no_weights = AlgorithmSettings(importance_sampling=ImportanceSamplingSettings(mode="none"))
    expected, its_gradient = our_loss(no_weights, batch)
    assert torch.equal(coupled, expected)
    assert torch.equal(gradient, its_gradient)


def test_what_is_rejected_has_no_gradient_and_is_counted() -> None:
    batch = random_batch(0)
    algorithm = AlgorithmSettings(importance_sampling=ImportanceSamplingSettings(rejection=GEOMETRIC))
    _, gradient = our_loss(algorithm, batch, sampler_log_probs=batch.sampler)
    rejected = [
        not 0.9 <= mean((batch.old - batch.sampler)[row, :length].tolist()) <= 1.1
        for row, length in enumerate(batch.lengths)
    ]
    assert 0 < sum(rejected) < len(rejected)
    for row, out in enumerate(rejected):
        assert not (out and gradient[row].any()), row
    statistics = policy_loss(
        algorithm,
        log_probs=batch.log_probs,
        advantages=batch.advantages[:, None].expand(batch.mask.shape),
        mask=batch.mask,
        old_log_probs=batch.old,
        sampler_log_probs=batch.sampler,
    ).statistics
    tokens = sum(length for length, out in zip(batch.lengths, rejected, strict=True) if out)
    assert summarize(statistics)["rejected"] == pytest.approx(tokens / sum(batch.lengths))


def test_decoupling_bounds_what_a_stale_sampler_costs() -> None:
    """A token that the learner has since made three times likelier is still learnt from, which plain PPO leaves out."""
    tensors = {
        "advantages": torch.ones(1, 1, dtype=torch.float64),
        "mask": torch.ones(1, 1, dtype=torch.bool),
        "sampler_log_probs": torch.full((1, 1), log(0.1), dtype=torch.float64),
        "old_log_probs": torch.full((1, 1), log(0.3), dtype=torch.float64),
    }
    gradients = {}
    for proximal in ("learner", "sampler"):
        leaf = torch.full((1, 1), log(0.3), dtype=torch.float64, requires_grad=True)
        policy_loss(AlgorithmSettings(proximal_policy=proximal), log_probs=leaf, **tensors).total.backward()
        gradients[proximal] = leaf.grad.item()
    assert gradients == {"learner": pytest.approx(-2.0), "sampler": 0.0}, "π_prox / μ = 3 is truncated at 2"
