"""Diagnostics: moments that add up over any cut of the batch, and finite numbers at the end."""

import math

import pytest
import torch

from rlhfless_functions.algorithms.diagnostics import (
    Moments,
    add_statistics,
    critic_statistics,
    policy_statistics,
    summarize,
)
from rlhfless_functions.algorithms.ratios import importance_ratio

torch.set_num_threads(1)

WIDTH = 7


def batch(seed: int, samples: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
        for name in ("log_probs", "old_log_probs", "advantages", "entropy", "sampler_log_probs", "reference_log_probs")
    }
    lengths = torch.randint(1, WIDTH + 1, (samples, 1), generator=generator)
    tensors["mask"] = torch.arange(WIDTH) < lengths
    tensors["advantages"] = tensors["advantages"][:, :1].expand(samples, WIDTH)
    return tensors


def statistics_of(tensors: dict[str, torch.Tensor], level: str) -> dict[str, Moments]:
    ratio = importance_ratio(tensors["log_probs"], tensors["old_log_probs"], tensors["mask"], level)
    return policy_statistics(ratio=ratio, clip_low=0.2, clip_high=0.28, **tensors)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_statistics_of_micro_batches_add_up_to_those_of_the_batch(level: str) -> None:
    tensors = batch(0)
    total: dict[str, Moments] = {}
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        total = add_statistics(total, statistics_of({name: tensor[rows] for name, tensor in tensors.items()}, level))
    whole = summarize(statistics_of(tensors, level))
    assert summarize(total) == {name: pytest.approx(value, abs=1e-12) for name, value in whole.items()}


def test_policy_statistics_are_what_their_names_say() -> None:
    tensors = batch(1)
    summary = summarize(statistics_of(tensors, "token"))
    flat = {name: tensor[tensors["mask"]] for name, tensor in tensors.items()}
    ratio = (flat["log_probs"] - flat["old_log_probs"]).exp()
    gap = flat["old_log_probs"] - flat["sampler_log_probs"]
    distance = flat["log_probs"] - flat["reference_log_probs"]
    expected = {
        "advantage": flat["advantages"].mean(),
        "advantage_std": flat["advantages"].std(correction=0),
        "advantage_min": flat["advantages"].min(),
        "advantage_max": flat["advantages"].max(),
        "ratio": ratio.mean(),
        "ratio_std": ratio.std(correction=0),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "clip_low": ((ratio < 0.8) & (flat["advantages"] < 0)).double().mean(),
        "clip_high": ((ratio > 1.28) & (flat["advantages"] > 0)).double().mean(),
        "approx_kl": (ratio - 1 - ratio.log()).mean(),
        "entropy": flat["entropy"].mean(),
        "kl": ((-distance).exp() - 1 + distance).mean(),
        "sampler_ratio": gap.exp().mean(),
        "sampler_ratio_std": gap.exp().std(correction=0),
        "sampler_ratio_min": gap.exp().min(),
        "sampler_ratio_max": gap.exp().max(),
        "sampler_mismatch": gap.abs().exp().mean(),
        "sampler_kl": (gap.exp() - 1 - gap).mean(),
    }
    assert summary == {name: pytest.approx(value.item()) for name, value in expected.items()}


def test_a_sequence_s_ratio_counts_once() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    ratio = torch.tensor([[1.5], [1.0], [9.0]])
    summary = summarize(
        policy_statistics(
            torch.zeros(3, 3), torch.zeros(3, 3), ratio, torch.ones(3, 3), mask, clip_low=0.2, clip_high=0.2
        )
    )
    assert (summary["ratio"], summary["ratio_max"], summary["clip_high"]) == (1.25, 1.5, 0.5)


def test_sampler_and_trainer_of_equal_weights_show_no_mismatch() -> None:
    tensors = batch(2)
    noise = 0.002 * torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    tensors["sampler_log_probs"] = tensors["old_log_probs"] + noise
    summary = summarize(statistics_of(tensors, "token"))
    assert summary["sampler_mismatch"] < 1.05
    assert summary["sampler_kl"] < 1e-3


@pytest.mark.parametrize(("noise", "explained"), [(0.0, 1.0), (None, 0.0)])
def test_explained_variance_of_a_perfect_critic_and_of_a_constant_one(noise: float | None, explained: float) -> None:
    returns = torch.tensor([[0.0, 1.0, 2.0], [3.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    values = returns if noise == 0.0 else torch.full_like(returns, 0.7)
    summary = summarize(critic_statistics(values, torch.zeros_like(values), returns, mask, 0.2))
    assert summary["explained_variance"] == pytest.approx(explained)
    assert summary["return"] == 1.5


def test_critic_statistics_are_what_their_names_say() -> None:
    generator = torch.Generator().manual_seed(4)
    values, old, returns = torch.randn(3, 4, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.arange(WIDTH) < torch.tensor([[7], [1], [3], [5]])
    halves = [
        critic_statistics(values[rows], old[rows], returns[rows], mask[rows], 0.5)
        for rows in (slice(0, 2), slice(2, 4))
    ]
    summary = summarize(add_statistics(*halves))
    value, error = values[mask], (returns - values)[mask]
    assert summary["value_std"] == pytest.approx(value.std(correction=0).item())
    assert summary["value_error"] == pytest.approx(error.mean().item())
    assert summary["value_clip"] == pytest.approx(((values - old)[mask].abs() > 0.5).double().mean().item())
    expected = 1 - error.var(correction=0) / returns[mask].var(correction=0)
    assert summary["explained_variance"] == pytest.approx(expected.item())


def test_what_has_no_value_is_left_out_and_the_rest_is_finite() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    nothing = torch.full((2, 3), torch.nan)
    assert summarize(critic_statistics(nothing, nothing, nothing, mask, None)) == {}
    assert summarize({"ratio": Moments.of(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool))}) == {}
    assert summarize({}) == {}
    ones = torch.ones(2, 3)
    constant = summarize(critic_statistics(ones, ones, ones, torch.ones(2, 3, dtype=torch.bool), None))
    assert "explained_variance" not in constant
    assert all(map(math.isfinite, constant.values()))


def test_statistics_of_some_micro_batches_only_are_kept() -> None:
    one, other = {"a": Moments.of(torch.ones(2), torch.ones(2, dtype=torch.bool))}, {}
    assert summarize(add_statistics(one, other)) == summarize(add_statistics(other, one)) == {"a": 1.0}
