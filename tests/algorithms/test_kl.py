"""The KL estimators, on a vocabulary of five tokens where the true KL can be summed up and differentiated."""

import pytest
import torch

from rlhfless_functions.algorithms.kl import kl_estimate, kl_loss
from rlhfless_functions.settings import KlSettings

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


def test_k1_is_refused_in_the_loss() -> None:
    with pytest.raises(ValueError, match="k1 in the loss"):
        kl_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), "k1")
    with pytest.raises(ValueError, match="k1 in the loss"):
        KlSettings(coefficient=0.1, placement="loss", estimator="k1")
