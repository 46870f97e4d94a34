"""The KL estimators, on a vocabulary of five tokens where the true KL can be summed up and differentiated."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhfless_functions.algorithms.advantages import estimate_advantages
from rlhfless_functions.algorithms.kl import kl_estimate, kl_loss
from rlhfless_functions.algorithms.ratios import MAX_LOG_RATIO
from rlhfless_functions.settings import AlgorithmSettings, KlSettings

torch.set_num_threads(1)

POLICY = torch.tensor([1.0, 0.2, -0.5, 0.4, -1.5], dtype=torch.float64)
REFERENCE = torch.tensor([0.3, 0.9, -0.1, -1.0, 0.0], dtype=torch.float64)
DRIFTED = POLICY + torch.tensor([0.3, -0.2, 0.1, 0.4, -0.3], dtype=torch.float64)


def true_kl(logits: torch.Tensor) -> float:
    probabilities = torch.softmax(logits, -1)
    return (probabilities * (probabilities.log() - torch.log_softmax(REFERENCE, -1))).sum().item()


def gradient_by_finite_differences(logits: torch.Tensor) -> list[float]:
    steps = 1e-5 * torch.eye(5, dtype=torch.float64)
    return [(true_kl(logits + step) - true_kl(logits - step)) / 2e-5 for step in steps]


def expected_gradient(logits: torch.Tensor, sampled_from: torch.Tensor, estimator: str) -> list[float]:
    """Mean gradient of the loss over tokens of the policy that sampled, by summing over the vocabulary."""
    leaf = logits.clone().requires_grad_()
    log_probs, old = torch.log_softmax(leaf, -1), torch.log_softmax(sampled_from, -1)
    ratio = (log_probs - old).exp()
    (old.exp() * kl_loss(log_probs, torch.log_softmax(REFERENCE, -1), ratio, estimator)).sum().backward()
    return leaf.grad.tolist()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradient_in_the_loss_is_that_of_the_true_kl(estimator: str) -> None:
    expected = gradient_by_finite_differences(POLICY)
    assert expected_gradient(POLICY, POLICY, estimator) == pytest.approx(expected, abs=1e-8)


def test_weighted_k3_keeps_the_true_gradient_when_the_policy_has_moved_on() -> None:
    expected = gradient_by_finite_differences(DRIFTED)
    assert expected_gradient(DRIFTED, POLICY, "k3") == pytest.approx(expected, abs=1e-8)


def test_what_is_avoided_is_really_wrong() -> None:
    """The naive gradients: k1's is zero on average, and that of k3 without its weight is another divergence's."""
    leaf = POLICY.clone().requires_grad_()
    log_probs = torch.log_softmax(leaf, -1)
    reference = torch.log_softmax(REFERENCE, -1)
    naive = {}
    for estimator in ("k1", "k3"):
        loss = (log_probs.detach().exp() * kl_estimate(log_probs, reference, estimator)).sum()
        naive[estimator] = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    expected = torch.tensor(gradient_by_finite_differences(POLICY))
    assert naive["k1"].abs().max() < 1e-12
    assert (naive["k3"] - expected).abs().max() > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    log_probs, reference = torch.log_softmax(POLICY, -1), torch.log_softmax(REFERENCE, -1)
    mean = (log_probs.exp() * kl_estimate(log_probs, reference, estimator)).sum().item()
    assert mean == pytest.approx(true_kl(POLICY), abs=1e-12)


def test_estimates_are_schulman_s() -> None:
    log_probs, reference = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -0.8]).double()
    delta = log_probs - reference
    assert kl_estimate(log_probs, reference, "k1").tolist() == pytest.approx([0.5, -1.2])
    assert kl_estimate(log_probs, reference, "k2").tolist() == pytest.approx([0.125, 0.72])
    expected = ((-delta).exp() - 1 + delta).tolist()
    assert kl_estimate(log_probs, reference, "k3").tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_token_that_a_model_rules_out_gives_finite_numbers(estimator: str) -> None:
    leaf = torch.tensor([-1e4, 0.0], requires_grad=True)
    loss = kl_loss(leaf, torch.tensor([0.0, -1e4]), torch.ones(2), estimator)
    loss.sum().backward()
    assert loss.isfinite().all() and leaf.grad.isfinite().all()


def gradient_in_the_reward(estimator: str) -> list[float]:
    """Mean policy gradient of minus the estimate as a reward, over the tokens that the policy samples."""
    leaf = POLICY.clone().requires_grad_()
    log_probs = torch.log_softmax(leaf, -1)
    reward = -kl_estimate(log_probs.detach(), torch.log_softmax(REFERENCE, -1), estimator)
    (-log_probs.detach().exp() * reward * log_probs).sum().backward()
    return leaf.grad.tolist()


def cosine(left: list[float], right: list[float]) -> float:
    return sum(map(float.__mul__, left, right)) / math.hypot(*left) / math.hypot(*right)


def test_in_the_reward_k1_alone_has_the_gradient_of_the_true_kl() -> None:
    expected = gradient_by_finite_differences(POLICY)
    assert gradient_in_the_reward("k1") == pytest.approx(expected, abs=1e-8)
    assert cosine(gradient_in_the_reward("k2"), expected) < 0.5
    assert cosine(gradient_in_the_reward("k3"), expected) < 0.5


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_one_unlikely_token_costs_little_in_the_reward(algorithm: str) -> None:
    """δ = −10 at β = 0.001: k3 would take 22 off a reward of 1."""
    settings = AlgorithmSettings(name=algorithm, kl=KlSettings(coefficient=0.001, placement="reward"))
    values = torch.zeros(2, 1) if algorithm == "ppo" else None
    log_probs, reference = torch.tensor([[-11.0], [-1.0]]), torch.tensor([[-1.0], [-1.0]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    estimate = estimate_advantages(
        settings, [1.0, 1.0], mask, log_probs=log_probs, reference_log_probs=reference, values=values
    )
    assert (estimate.advantages[0] - estimate.advantages[1]).abs().max() <= 0.0201


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    delta=st.floats(-100, 100, width=32),
    log_ratio=st.floats(-25, 25, width=32),
)
@example(delta=-19.0, log_ratio=0.0)
@example(delta=-21.0, log_ratio=0.0)
@settings(max_examples=200, deadline=None)
def test_the_weighted_k3_has_its_value_and_the_true_gradient_at_any_distance(
    dtype: torch.dtype, delta: float, log_ratio: float
) -> None:
    """The value is ρ k3, with exp(−δ) at most exp(20), and finite. The gradient is exactly ρ δ."""
    log_prob = torch.tensor(-0.5, dtype=dtype, requires_grad=True)
    reference = torch.tensor(-0.5 - delta, dtype=dtype)
    exact = -0.5 - reference.item()  # what is left of δ in this type
    ratio = torch.tensor(log_ratio, dtype=dtype).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = kl_loss(log_prob, reference, ratio, "k3")
    loss.backward()
    weight = ratio.item()
    value = weight * (math.expm1(min(max(-exact, -MAX_LOG_RATIO), MAX_LOG_RATIO)) + exact)
    rounding = 1e-6 if dtype == torch.float32 else 1e-14
    assert log_prob.grad.item() == pytest.approx(weight * exact, rel=rounding)
    assert loss.item() == pytest.approx(value, rel=10 * rounding, abs=10 * rounding * weight * max(1.0, abs(exact)))
    assert loss.isfinite() and log_prob.grad.isfinite()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_are_refused_in_the_reward(estimator: str) -> None:
    with pytest.raises(ValueError, match=f"{estimator} in the reward has a different gradient from the KL's"):
        KlSettings(coefficient=0.1, placement="reward", estimator=estimator)


def test_k1_is_refused_in_the_loss() -> None:
    with pytest.raises(ValueError, match="k1 in the loss"):
        kl_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), "k1")
    with pytest.raises(ValueError, match="k1 in the loss"):
        KlSettings(coefficient=0.1, placement="loss", estimator="k1")
