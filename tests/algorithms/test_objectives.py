"""The composed losses: every algorithm of the settings, whole; and those that TRL lacks, by their papers' formulas."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.algorithms.advantages import estimate_advantages, normalize_batch
from rlhfless_functions.algorithms.aggregation import normalizer
from rlhfless_functions.algorithms.diagnostics import add_statistics, summarize
from rlhfless_functions.algorithms.objectives import critic_loss, policy_loss
from rlhfless_functions.settings import (
    AlgorithmName,
    AlgorithmSettings,
    CriticSettings,
    ImportanceSamplingSettings,
    KlSettings,
)

torch.set_num_threads(1)

LONGEST = 6
Tensors = dict[str, torch.Tensor]


def random_tensors(seed: int, samples: int = 8) -> Tensors:
    """Ragged responses [samples, LONGEST], one of them without any token that counts."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(samples, LONGEST, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (samples, 1), generator=generator)
    lengths[samples // 2] = 0
    old = -noise(1.0).abs()
    return {
        "mask": torch.arange(LONGEST) < lengths,
        "old_log_probs": old,
        "log_probs": old + noise(0.3),
        "sampler_log_probs": old + noise(0.4),
        "reference_log_probs": old + noise(0.4),
        "entropy": noise(1.0).abs(),
        "advantages": noise(1.0),
    }


def everything_on(name: AlgorithmName) -> AlgorithmSettings:
    """The algorithm with each optional term as well."""
    return AlgorithmSettings(
        name=name,
        kl=KlSettings(coefficient=0.2, estimator="k3"),
        entropy_coefficient=0.1,
        dual_clip=1.5 if AlgorithmSettings(name=name).resolved().clip == "ppo" else None,
    )


def rows_of(tensors: Tensors, rows: list[int]) -> Tensors:
    return {name: tensor[rows] for name, tensor in tensors.items()}


def gradient(loss: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    leaf = at.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def gradient_by_finite_differences(loss: Callable[[torch.Tensor], float], at: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(at)
    for index in range(at.numel()):
        step = torch.zeros_like(at)
        step.view(-1)[index] = 1e-6
        result.view(-1)[index] = (loss(at + step) - loss(at - step)) / 2e-6
    return result


# --- properties of every algorithm -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", get_args(AlgorithmName))
@given(seed=st.integers(0, 10_000), size=st.sampled_from([1, 2, 8]), order=st.randoms(use_true_random=False))
@settings(max_examples=8, deadline=None)
def test_any_cut_into_micro_batches_gives_the_same_gradient_and_statistics(
    name: AlgorithmName, seed: int, size: int, order: Any
) -> None:
    algorithm, tensors = everything_on(name), random_tensors(seed)
    rows = list(range(8))
    order.shuffle(rows)
    divisor = normalizer(tensors["mask"].sum(-1).tolist(), algorithm.resolved().aggregation, LONGEST)
    whole = policy_loss(algorithm, **tensors)
    statistics: dict[str, Any] = {}
    parts = torch.zeros(8, LONGEST, dtype=torch.float64)
    for start in range(0, 8, size):
        part = rows_of(tensors, rows[start : start + size])
        others = {key: value for key, value in part.items() if key != "log_probs"}
        parts[rows[start : start + size]] = gradient(
            lambda leaf, others=others: policy_loss(algorithm, log_probs=leaf, **others).total / divisor,
            part["log_probs"],
        )
        statistics = add_statistics(statistics, policy_loss(algorithm, **part).statistics)
    others = {key: value for key, value in tensors.items() if key != "log_probs"}
    expected = gradient(
        lambda leaf: policy_loss(algorithm, log_probs=leaf, **others).total / divisor, tensors["log_probs"]
    )
    torch.testing.assert_close(parts, expected, rtol=1e-12, atol=1e-15)
    assert summarize(statistics) == {
        key: pytest.approx(value, abs=1e-9) for key, value in summarize(whole.statistics).items()
    }


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_gradient_is_the_slope_of_the_loss(name: AlgorithmName) -> None:
    """But for CISPO, whose loss is a surrogate with a detached weight: see test_losses.py."""
    algorithm, tensors = everything_on(name), random_tensors(5)
    log_probs = tensors.pop("log_probs")
    if name == "cispo":
        algorithm = algorithm.model_copy(update={"clip": "ppo"})

    def loss(leaf: torch.Tensor) -> torch.Tensor:
        return policy_loss(algorithm, log_probs=leaf, **tensors).total

    expected = gradient_by_finite_differences(lambda at: loss(at).item(), log_probs)
    torch.testing.assert_close(gradient(loss, log_probs), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", get_args(AlgorithmName))
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_a_row_alone_is_the_row_in_a_ragged_batch_whatever_stands_in_its_padding(
    name: AlgorithmName, poison: float
) -> None:
    algorithm, tensors = everything_on(name), random_tensors(6)
    mask = tensors["mask"]
    poisoned = {key: torch.where(mask, value, poison) for key, value in tensors.items() if key != "mask"}
    log_probs = poisoned.pop("log_probs")
    batch = gradient(lambda leaf: policy_loss(algorithm, log_probs=leaf, mask=mask, **poisoned).total, log_probs)
    assert not batch[~mask].any()
    total = 0.0
    for row, length in enumerate(mask.sum(-1).tolist()):
        alone = {key: value[row : row + 1, :length] for key, value in tensors.items()}
        at = alone.pop("log_probs")
        total += policy_loss(algorithm, log_probs=at, **alone).total.item()
        expected = gradient(lambda leaf, alone=alone: policy_loss(algorithm, log_probs=leaf, **alone).total, at)
        torch.testing.assert_close(batch[row, :length], expected[0], rtol=1e-12, atol=1e-15)
    assert policy_loss(algorithm, log_probs=log_probs, mask=mask, **poisoned).total.item() == pytest.approx(total)


# --- single terms ------------------------------------------------------------------------------------------------


def test_importance_weights_scale_the_policy_term_and_nothing_else() -> None:
    tensors = random_tensors(7)
    others = {key: tensors[key] for key in ("log_probs", "old_log_probs", "mask", "advantages")}
    plain = AlgorithmSettings(importance_sampling=ImportanceSamplingSettings(high=1.5))
    ratio = (tensors["old_log_probs"] - tensors["sampler_log_probs"]).exp().clamp(max=1.5)
    weighted = policy_loss(plain, sampler_log_probs=tensors["sampler_log_probs"], **others).total
    by_hand = policy_loss(plain, **{**others, "advantages": tensors["advantages"] * ratio}).total
    torch.testing.assert_close(weighted, by_hand)
    off = AlgorithmSettings(importance_sampling=ImportanceSamplingSettings(mode="none"))
    unweighted = policy_loss(off, sampler_log_probs=tensors["sampler_log_probs"], **others).total
    torch.testing.assert_close(unweighted, policy_loss(off, **others).total)

    still = {**others, "advantages": torch.zeros_like(tensors["advantages"])}
    with_kl = plain.model_copy(update={"kl": KlSettings(coefficient=0.3)})
    reference = {"reference_log_probs": tensors["reference_log_probs"]}
    torch.testing.assert_close(
        policy_loss(with_kl, sampler_log_probs=tensors["sampler_log_probs"], **still, **reference).total,
        policy_loss(with_kl, **still, **reference).total,
    )


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_product"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss_is_weighted_token_by_token_whatever_the_ratio_level(level: Any, estimator: Any) -> None:
    tensors = random_tensors(8)
    mask = tensors["mask"]
    algorithm = AlgorithmSettings(ratio_level=level, kl=KlSettings(coefficient=0.3, estimator=estimator))
    loss = policy_loss(algorithm, **{**tensors, "advantages": torch.zeros_like(tensors["advantages"])}).total
    delta = (tensors["log_probs"] - tensors["reference_log_probs"])[mask]
    ratio = (tensors["log_probs"] - tensors["old_log_probs"])[mask].exp()
    per_token = delta.square() / 2 if estimator == "k2" else ratio * ((-delta).exp() - 1 + delta)
    assert loss.item() == pytest.approx(0.3 * per_token.sum().item())


def test_kl_in_the_reward_is_not_in_the_loss_too() -> None:
    tensors = random_tensors(9)
    in_reward = AlgorithmSettings(name="ppo", kl=KlSettings(coefficient=0.3, placement="reward", estimator="k1"))
    torch.testing.assert_close(
        policy_loss(in_reward, **tensors).total, policy_loss(AlgorithmSettings(name="ppo"), **tensors).total
    )


def test_entropy_bonus_is_subtracted() -> None:
    tensors = random_tensors(10)
    with_bonus = policy_loss(AlgorithmSettings(entropy_coefficient=0.1), **tensors).total
    without = policy_loss(AlgorithmSettings(), **tensors).total
    expected = 0.1 * tensors["entropy"][tensors["mask"]].sum()
    torch.testing.assert_close(without - with_bonus, expected)


@pytest.mark.parametrize(
    ("algorithm", "missing"),
    [
        (AlgorithmSettings(entropy_coefficient=0.1), "entropy"),
        (AlgorithmSettings(kl=KlSettings(coefficient=0.1)), "reference"),
    ],
)
def test_a_missing_tensor_is_named(algorithm: AlgorithmSettings, missing: str) -> None:
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match=missing):
        policy_loss(algorithm, log_probs=-ones, advantages=ones, mask=ones.bool())


# --- whole algorithms that TRL lacks, by the papers' formulas ----------------------------------------------------


def whiten(rows: list[list[float]]) -> list[list[float]]:
    flat = [value for row in rows for value in row]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((value - mean) ** 2 for value in flat) / (len(flat) - 1)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def clipped_surrogate(log_probs: torch.Tensor, old: torch.Tensor, advantages: list[list[float]]) -> float:
    """PPO, eq. 7: the mean over all tokens of −min(ρ A, clip(ρ, 0.8, 1.2) A)."""
    terms = []
    for row, of_row in enumerate(advantages):
        for t, advantage in enumerate(of_row):
            ratio = math.exp(log_probs[row, t].item() - old[row, t].item())
            terms.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
    return math.fsum(terms) / len(terms)


def per_token_rewards(tensors: Tensors, rewards: list[float], beta: float) -> list[list[float]]:
    """−β (log π_old − log π_ref) at each token, and the reward at the last."""
    result = []
    for row, length in enumerate(tensors["mask"].sum(-1).tolist()):
        gaps = (tensors["old_log_probs"] - tensors["reference_log_probs"])[row, :length].tolist()
        of_row = [-beta * gap for gap in gaps]
        if of_row:
            of_row[-1] += rewards[row]
        result.append(of_row)
    return result


def our_policy_step(algorithm: AlgorithmSettings, tensors: Tensors, rewards: list[float], **values: Any) -> Any:
    """Preparation, normalisation and loss as the functions call them: (loss, gradient, the estimate)."""
    mask = tensors["mask"]
    estimate = estimate_advantages(
        algorithm,
        rewards,
        mask,
        log_probs=tensors["old_log_probs"],
        reference_log_probs=tensors["reference_log_probs"],
        **values,
    )
    advantages = normalize_batch(estimate.advantages, estimate.mask)
    divisor = normalizer(mask.sum(-1).tolist(), algorithm.resolved().aggregation, LONGEST)

    def loss(leaf: torch.Tensor) -> torch.Tensor:
        old = tensors["old_log_probs"]
        return (
            policy_loss(algorithm, log_probs=leaf, old_log_probs=old, advantages=advantages, mask=mask).total / divisor
        )

    return loss(tensors["log_probs"]).item(), gradient(loss, tensors["log_probs"]), estimate


REWARDS = [1.0, 0.0, 0.5, -1.0, 0.3, 2.0, 0.0, 1.0]


@pytest.mark.parametrize("seed", range(3))
def test_reinforce_plus_plus_is_its_paper_s(seed: int) -> None:
    """arXiv 2501.03262: returns of reward − β k1, normalised over the batch, in PPO's clipped objective; no critic."""
    tensors, beta = random_tensors(seed), 0.05
    kl = KlSettings(coefficient=beta, placement="reward", estimator="k1")
    loss, slope, _ = our_policy_step(AlgorithmSettings(name="reinforce_plus_plus", kl=kl), tensors, REWARDS)
    returns = [[math.fsum(row[t:]) for t in range(len(row))] for row in per_token_rewards(tensors, REWARDS, beta)]
    advantages = whiten(returns)

    def formula(log_probs: torch.Tensor) -> float:
        return clipped_surrogate(log_probs, tensors["old_log_probs"], advantages)

    assert loss == pytest.approx(formula(tensors["log_probs"]), abs=1e-12)
    expected = gradient_by_finite_differences(formula, tensors["log_probs"])
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_gmpo_is_its_paper_s(seed: int) -> None:
    """arXiv 2507.20673, eq. 4: the geometric mean over tokens of ratios that are clipped to (e^−0.4, e^0.4)."""
    tensors = random_tensors(seed)
    tensors["log_probs"] = tensors["old_log_probs"] + 2 * (tensors["log_probs"] - tensors["old_log_probs"])
    low, high = 1 - math.exp(-0.4), math.exp(0.4) - 1
    algorithm = AlgorithmSettings(name="gmpo", clip_low=low, clip_high=high)
    defaults = AlgorithmSettings(name="gmpo").resolved()
    assert (defaults.clip_low, defaults.clip_high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    of_samples = tensors["advantages"][:, 0]
    tensors["advantages"] = of_samples[:, None].expand(8, LONGEST)
    lengths = tensors["mask"].sum(-1).tolist()
    divisor = normalizer(lengths, "seq-mean-token-mean", LONGEST)
    others = {key: tensors[key] for key in ("old_log_probs", "advantages", "mask")}

    def loss(leaf: torch.Tensor) -> torch.Tensor:
        return policy_loss(algorithm, log_probs=leaf, **others).total / divisor

    def formula(log_probs: torch.Tensor) -> float:
        terms = []
        for row, length in enumerate(lengths):
            advantage, product = of_samples[row].item(), 1.0
            for t in range(length):
                ratio = math.exp((log_probs - tensors["old_log_probs"])[row, t].item())
                clipped = min(max(ratio, math.exp(-0.4)), math.exp(0.4))
                product *= min(ratio, clipped) if advantage > 0 else max(ratio, clipped)
            if length:
                terms.append(-(product ** (1 / length)) * advantage)
        return math.fsum(terms) / len(terms)

    assert loss(tensors["log_probs"]).item() == pytest.approx(formula(tensors["log_probs"]), abs=1e-12)
    expected = gradient_by_finite_differences(formula, tensors["log_probs"])
    torch.testing.assert_close(gradient(loss, tensors["log_probs"]), expected, rtol=1e-6, atol=1e-8)
    statistics = summarize(policy_loss(algorithm, log_probs=tensors["log_probs"], **others).statistics)
    assert 0 < statistics["clip_low"] < 1 and 0 < statistics["clip_high"] < 1


@pytest.mark.parametrize("seed", range(3))
def test_ppo_is_its_papers(seed: int) -> None:
    """GAE (arXiv 1506.02438) on reward − β k1, whitened; the clipped objective; the clipped value loss."""
    tensors, beta, gamma, gae_lambda = random_tensors(seed), 0.05, 0.98, 0.9
    generator = torch.Generator().manual_seed(100 + seed)
    old_values, moved = torch.randn(2, 8, LONGEST, generator=generator, dtype=torch.float64)
    values = old_values + 0.3 * moved
    algorithm = AlgorithmSettings(
        name="ppo",
        gamma=gamma,
        gae_lambda=gae_lambda,
        kl=KlSettings(coefficient=beta, placement="reward", estimator="k1"),
        critic=CriticSettings(value_clip=0.2),
    )
    loss, slope, estimate = our_policy_step(algorithm, tensors, REWARDS, values=old_values)

    advantages, targets = [], []
    for row, rewards in enumerate(per_token_rewards(tensors, REWARDS, beta)):
        v = [*old_values[row, : len(rewards)].tolist(), 0.0]
        deltas = [reward + gamma * v[t + 1] - v[t] for t, reward in enumerate(rewards)]
        gae = [
            math.fsum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
            for t in range(len(deltas))
        ]
        advantages.append(gae)
        targets.append([advantage + value for advantage, value in zip(gae, v, strict=False)])
    whitened = whiten(advantages)

    def formula(log_probs: torch.Tensor) -> float:
        return clipped_surrogate(log_probs, tensors["old_log_probs"], whitened)

    assert loss == pytest.approx(formula(tensors["log_probs"]), abs=1e-12)
    expected = gradient_by_finite_differences(formula, tensors["log_probs"])
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-8)

    def value_formula(at: torch.Tensor) -> float:
        terms = []
        for row, of_row in enumerate(targets):
            for t, target in enumerate(of_row):
                new, old = at[row, t].item(), old_values[row, t].item()
                kept = min(max(new, old - 0.2), old + 0.2)
                terms.append(0.5 * max((new - target) ** 2, (kept - target) ** 2))
        return math.fsum(terms) / len(terms)

    mask = tensors["mask"]
    divisor = normalizer(mask.sum(-1).tolist(), "token-mean", LONGEST)

    def our_value_loss(leaf: torch.Tensor) -> torch.Tensor:
        part = critic_loss(algorithm, values=leaf, old_values=old_values, returns=estimate.returns, mask=mask)
        return part.total / divisor

    assert our_value_loss(values).item() == pytest.approx(value_formula(values), abs=1e-12)
    expected = gradient_by_finite_differences(value_formula, values)
    torch.testing.assert_close(gradient(our_value_loss, values), expected, rtol=1e-6, atol=1e-8)


def test_critic_s_loss_has_statistics_and_ignores_padding() -> None:
    mask = torch.tensor([[True, False]])
    part = critic_loss(
        AlgorithmSettings(name="ppo"),
        values=torch.tensor([[1.0, math.nan]]),
        old_values=torch.tensor([[0.0, math.inf]]),
        returns=torch.tensor([[2.0, math.nan]]),
        mask=mask,
    )
    assert part.total.item() == pytest.approx(0.5 * 1.8**2)
    assert summarize(part.statistics)["value_clip"] == 1.0
