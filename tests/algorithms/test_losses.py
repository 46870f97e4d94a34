"""Clipped objectives and the critic's loss, case by case: value and gradient."""

import math

import pytest
import torch

from rlhfless_functions.algorithms.losses import cispo_loss, ppo_loss, sapo_loss, value_loss

torch.set_num_threads(1)


def value_and_slope(loss: torch.Tensor, leaf: torch.Tensor) -> tuple[float, float]:
    loss.sum().backward()
    return loss.item(), leaf.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.0),
        (1.5, 2.0, -2.56, 0.0),  # far enough up: clipped at 1.28
        (0.5, 2.0, -1.0, -2.0),  # too low for a good token: never clipped
        (0.5, -2.0, 1.6, 0.0),  # far enough down: clipped at 0.8
        (1.5, -2.0, 3.0, 2.0),  # too high for a bad token: never clipped
    ],
)
def test_ppo(ratio: float, advantage: float, value: float, slope: float) -> None:
    leaf = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    loss = ppo_loss(leaf, torch.tensor([[advantage]], dtype=torch.float64), 0.2, 0.28)
    assert value_and_slope(loss, leaf) == (pytest.approx(value), pytest.approx(slope))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (2.9, -2.0, 5.8, 2.0),
        (7.0, -2.0, 6.0, 0.0),  # bounded at three times the advantage
        (7.0, 2.0, -2.4, 0.0),
        (0.1, 2.0, -0.2, -2.0),
        (0.1, -2.0, 1.6, 0.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_a_bad_token_alone(
    ratio: float, advantage: float, value: float, slope: float
) -> None:
    leaf = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    loss = ppo_loss(leaf, torch.tensor([[advantage]], dtype=torch.float64), 0.2, 0.2, dual_clip=3.0)
    assert value_and_slope(loss, leaf) == (pytest.approx(value), pytest.approx(slope))


@pytest.mark.parametrize(
    ("ratio", "clip_low", "weight"), [(0.01, 1.0, 0.01), (0.9, 1.0, 0.9), (5.0, 1.0, 1.28), (0.3, 0.5, 0.5)]
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_clips_the_weight_and_keeps_every_token_s_gradient(
    ratio: float, clip_low: float, weight: float, advantage: float
) -> None:
    log_prob = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    attached = ratio * (log_prob + 1.5).exp()
    loss = cispo_loss(attached, log_prob, torch.tensor([[advantage]], dtype=torch.float64), clip_low, 0.28)
    expected = (pytest.approx(weight * advantage * 1.5), pytest.approx(-weight * advantage))
    assert value_and_slope(loss, log_prob) == expected


@pytest.mark.parametrize(("advantage", "temperature"), [(2.0, 1.0), (-2.0, 1.5), (0.0, 1.5)])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 3.0, 50.0])
def test_sapo_s_gate_is_the_plain_gradient_at_one_and_fades_out_from_there(
    advantage: float, temperature: float, ratio: float
) -> None:
    leaf = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    loss = sapo_loss(leaf, torch.tensor([[advantage]], dtype=torch.float64), 1.0, 1.5)
    value = -4 / temperature / (1 + math.exp(-temperature * (ratio - 1))) * advantage
    slope = -advantage / math.cosh(temperature * (ratio - 1) / 2) ** 2
    assert value_and_slope(loss, leaf) == (pytest.approx(value), pytest.approx(slope))


def test_one_ratio_for_a_whole_sequence_is_applied_to_each_token() -> None:
    ratio = torch.tensor([[1.1], [0.7]])
    log_probs, advantages = -torch.ones(2, 3), torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    assert torch.equal(ppo_loss(ratio, advantages, 0.2, 0.2), ppo_loss(ratio.expand(2, 3), advantages, 0.2, 0.2))
    whole = cispo_loss(ratio, log_probs, advantages, 1.0, 0.2)
    assert torch.equal(whole, cispo_loss(ratio.expand(2, 3), log_probs, advantages, 1.0, 0.2))


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope"),
    [
        (1.1, None, 0.5 * 0.9**2, -0.9),
        (1.1, 0.2, 0.5 * 0.9**2, -0.9),
        (1.5, 0.2, 0.5 * 0.8**2, 0.0),  # moved further towards the return than the clip allows
        (0.5, 0.2, 0.5 * 1.5**2, -1.5),  # moved away: the larger loss counts, and pulls back
    ],
)
def test_value_loss(value: float, clip: float | None, loss: float, slope: float) -> None:
    leaf = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 2.0, dtype=torch.float64)
    assert value_and_slope(value_loss(leaf, old, returns, clip), leaf) == (pytest.approx(loss), pytest.approx(slope))
