"""Advantages, against the papers' formulas written as loops in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.algorithms.advantages import (
    discounted_returns,
    estimate_advantages,
    generalized_advantages,
    group_advantages,
    normalize_batch,
    token_rewards,
)
from rlhfless_functions.settings import AlgorithmSettings, KlSettings

torch.set_num_threads(1)

quick = settings(max_examples=50, deadline=None)
reward_lists = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=12)


def ragged(seed: int, samples: int = 5, width: int = 11) -> tuple[torch.Tensor, list[int], torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (samples,), generator=generator)
    return torch.arange(width) < lengths[:, None], lengths.tolist(), generator


def noise(generator: torch.Generator, mask: torch.Tensor) -> torch.Tensor:
    return torch.randn(mask.shape, generator=generator, dtype=torch.float64)


# --- a group's baseline ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave_one_out", [False, True])
@given(rewards=reward_lists, scale=st.booleans())
@quick
def test_group_advantages_are_the_formula(leave_one_out: bool, rewards: list[float | None], scale: bool) -> None:
    scores = [reward for reward in rewards if reward is not None]
    ours = group_advantages(rewards, leave_one_out=leave_one_out, scale=scale).tolist()
    for reward, advantage in zip(rewards, ours, strict=True):
        if reward is None or len(scores) < 2:
            assert advantage == 0
            continue
        mean = math.fsum(scores) / len(scores)
        baseline = (math.fsum(scores) - reward) / (len(scores) - 1) if leave_one_out else mean
        expected = reward - baseline
        if scale:
            expected /= math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) + 1e-4
        assert advantage == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("scale", [False, True])
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 64), single=st.booleans())
@quick
def test_constant_group_gives_exact_zeros(
    leave_one_out: bool, scale: bool, reward: float, size: int, single: bool
) -> None:
    """In float32 the mean of eight times 0.1 is not 0.1, and the rest divided by a deviation near 0 is not small."""
    reward = float(np.float32(reward)) if single else reward
    advantages = group_advantages([reward] * size, leave_one_out=leave_one_out, scale=scale)
    assert advantages.tolist() == [0.0] * size


def test_seven_against_one() -> None:
    advantages = group_advantages([1.0] * 7 + [0.0], leave_one_out=False, scale=True)
    deviation = math.sqrt((7 * (1 / 8) ** 2 + (7 / 8) ** 2) / 7)
    assert advantages.tolist() == pytest.approx([0.125 / (deviation + 1e-4)] * 7 + [-0.875 / (deviation + 1e-4)])


def test_unscorable_sample_is_out_of_the_baseline_and_out_of_the_loss() -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    estimate = estimate_advantages(AlgorithmSettings(name="dr_grpo"), [1.0, None, 0.0], mask)
    assert estimate.advantages.tolist() == [[0.5, 0.5], [0, 0], [-0.5, -0.5]]
    assert estimate.mask.tolist() == [[True, True], [False, False], [True, True]]
    assert estimate.returns is None


def test_advantage_of_a_response_stands_at_each_of_its_tokens_and_on_no_padding() -> None:
    mask, _, _ = ragged(0)
    advantages = estimate_advantages(AlgorithmSettings(), [0.0, 1.0, 0.0, 1.0, 1.0], mask).advantages
    assert torch.equal(advantages, torch.where(mask, advantages[:, :1], 0.0))
    assert (advantages[:, 0] != 0).all()


def test_kl_penalty_of_a_response_is_summed_up_where_the_baseline_is_the_group() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    kl = KlSettings(coefficient=0.5, placement="reward", estimator="k1")
    estimate = estimate_advantages(
        AlgorithmSettings(name="dr_grpo", kl=kl),
        [1.0, 1.0],
        mask,
        log_probs=torch.tensor([[-1.0, -1.0], [-1.0, torch.nan]]),
        reference_log_probs=torch.tensor([[-2.0, -3.0], [-1.0, 7.0]]),
    )
    assert estimate.advantages.tolist() == [[-0.75, -0.75], [0.75, 0.0]]


# --- token by token ----------------------------------------------------------------------------------------------


def gae_by_loops(
    rewards: list[float], values: list[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Schulman et al. 2016, eq. 11, 12 and 16: A_t = Σ_l (γλ)^l δ_(t+l)."""
    count = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)]
    advantages = [sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.9, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_generalized_advantages_are_the_formula(seed: int, gamma: float, gae_lambda: float) -> None:
    mask, lengths, generator = ragged(seed)
    rewards, values = noise(generator, mask), noise(generator, mask)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, gae_lambda)
    for row, length in enumerate(lengths):
        expected = gae_by_loops(rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, gae_lambda)
        assert advantages[row, :length].tolist() == pytest.approx(expected[0], abs=1e-12)
        assert returns[row, :length].tolist() == pytest.approx(expected[1], abs=1e-12)
    assert not advantages[~mask].any() and not returns[~mask].any()


@pytest.mark.parametrize("gamma", [1.0, 0.97])
@pytest.mark.parametrize("width", [1, 2, 13, 64])
def test_discounted_returns_are_the_formula(gamma: float, width: int) -> None:
    mask, lengths, generator = ragged(1, width=width)
    rewards = noise(generator, mask)
    returns = discounted_returns(rewards, mask, gamma)
    for row, length in enumerate(lengths):
        expected = [sum(gamma ** (k - t) * rewards[row, k].item() for k in range(t, length)) for t in range(length)]
        assert returns[row, :length].tolist() == pytest.approx(expected, abs=1e-12)
    assert not returns[~mask].any()


def test_with_lambda_and_gamma_of_one_the_advantage_is_the_return_minus_the_value() -> None:
    mask, _, generator = ragged(2)
    rewards, values = noise(generator, mask), noise(generator, mask)
    advantages, returns = generalized_advantages(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, discounted_returns(rewards, mask, 1.0))
    torch.testing.assert_close(advantages, torch.where(mask, returns - values, 0.0))


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus"])
def test_score_stands_at_the_last_token_and_the_penalty_at_each(name: str) -> None:
    mask, lengths, generator = ragged(3)
    log_probs, reference, values = (noise(generator, mask) for _ in range(3))
    rewards = [1.0, 0.0, None, -0.5, 2.0]
    algorithm = AlgorithmSettings(
        name=name,
        gamma=0.9,
        gae_lambda=0.8 if name == "ppo" else 1.0,
        kl=KlSettings(coefficient=0.3, placement="reward", estimator="k1"),
    )
    estimate = estimate_advantages(
        algorithm, rewards, mask, log_probs=log_probs, reference_log_probs=reference, values=values
    )
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        if reward is None:
            assert not estimate.mask[row].any() and not estimate.advantages[row].any()
            continue
        per_token = [-0.3 * (log_probs[row, t] - reference[row, t]).item() for t in range(length)]
        per_token[-1] += reward
        if name == "ppo":
            expected, targets = gae_by_loops(per_token, values[row, :length].tolist(), 0.9, 0.8)
            assert estimate.returns[row, :length].tolist() == pytest.approx(targets, abs=1e-12)
        else:
            # REINFORCE++, arXiv 2501.03262: A_t = Σ_(i ≥ t) γ^(i−t) (1[i = T] r − β KL_i), with no baseline
            expected = [sum(0.9 ** (i - t) * per_token[i] for i in range(t, length)) for t in range(length)]
            assert estimate.returns is None
        assert estimate.advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-12)


def test_empty_responses_are_harmless() -> None:
    mask = torch.zeros(2, 0, dtype=torch.bool)
    estimate = estimate_advantages(AlgorithmSettings(name="ppo"), [1.0, 0.0], mask, values=torch.zeros(2, 0))
    assert estimate.advantages.shape == (2, 0)
    one_empty = torch.tensor([[True, True], [False, False]])
    assert token_rewards([1.0, 1.0], torch.zeros(2, 2), one_empty).tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo", "reinforce_plus_plus"])
def test_a_row_alone_has_the_advantages_that_it_has_in_a_ragged_batch(name: str) -> None:
    mask, lengths, generator = ragged(4)
    rewards = [0.5] * 5
    rewards[2] = 1.0
    tensors = {key: noise(generator, mask) for key in ("log_probs", "reference_log_probs", "values")}
    kl = KlSettings(coefficient=0.3, placement="reward", estimator="k1")
    algorithm = AlgorithmSettings(name=name, kl=kl)
    batch = estimate_advantages(algorithm, rewards, mask, **tensors).advantages
    poisoned = {key: torch.where(mask, value, torch.nan) for key, value in tensors.items()}
    assert torch.equal(batch, estimate_advantages(algorithm, rewards, mask, **poisoned).advantages)
    widest = max(lengths)
    narrow = {key: value[:, :widest] for key, value in tensors.items()}
    assert torch.equal(
        batch[:, :widest], estimate_advantages(algorithm, rewards, mask[:, :widest], **narrow).advantages
    )
    if name in ("ppo", "reinforce_plus_plus"):
        for row, length in enumerate(lengths):
            alone = {key: value[row : row + 1, :length] for key, value in tensors.items()}
            only = estimate_advantages(algorithm, rewards[row : row + 1], mask[row : row + 1, :length], **alone)
            assert torch.equal(only.advantages[0], batch[row, :length])


@pytest.mark.parametrize(
    ("algorithm", "missing"),
    [
        (AlgorithmSettings(name="ppo"), "critic's values"),
        (AlgorithmSettings(kl=KlSettings(coefficient=0.1, placement="reward")), "reference"),
    ],
)
def test_a_missing_tensor_is_named(algorithm: AlgorithmSettings, missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        estimate_advantages(algorithm, [1.0], torch.ones(1, 1, dtype=torch.bool))


# --- over the batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_batch_normalisation_is_the_formula_over_all_tokens(
    dtype: torch.dtype, tolerance: float, offset: float
) -> None:
    mask, _, generator = ragged(5)
    advantages = (noise(generator, mask) + offset).to(dtype)
    chosen = advantages[mask].double().numpy()
    expected = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    whitened = normalize_batch(torch.where(mask, advantages, torch.nan), mask)
    assert whitened.dtype == dtype
    np.testing.assert_allclose(whitened[mask].numpy(), expected, atol=tolerance, rtol=tolerance)
    assert not whitened[~mask].any()


def test_batch_normalisation_counts_tokens_and_not_responses() -> None:
    mask = torch.tensor([[True] * 8, [True] + [False] * 7])
    whitened = normalize_batch(torch.where(mask, torch.tensor([[1.0], [0.0]]), 0.0), mask)
    assert whitened[mask].sum().item() == pytest.approx(0, abs=1e-6)
    assert whitened[1, 0] == pytest.approx(-8 * whitened[0, 0].item())


@pytest.mark.parametrize("value", [0.1, -3.7, 0.0])
def test_batch_of_equal_advantages_gives_exact_zeros(value: float) -> None:
    mask, _, _ = ragged(6)
    assert not normalize_batch(torch.full(mask.shape, value), mask).any()


@pytest.mark.parametrize("tokens", [0, 1])
def test_batch_of_hardly_a_token_gives_zeros(tokens: int) -> None:
    mask = torch.arange(3)[None] < tokens
    assert normalize_batch(torch.ones(1, 3), mask).tolist() == [[0, 0, 0]]
