"""Importance weights equal those that TRL's trainer computes of the same log-probabilities, in each of its modes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rlhfless_functions.algorithms.diagnostics import summarize
from rlhfless_functions.algorithms.objectives import policy_loss
from rlhfless_functions.algorithms.ratios import correction_weights, sampler_ratio
from rlhfless_functions.settings import AlgorithmSettings, ImportanceSamplingSettings
from tests.algorithms.differences import assert_same
from tests.algorithms.test_losses_against_trl import assert_equal, our_loss, random_batch, trl_loss
from tests.algorithms.trl_trainers import LONGEST, SAMPLES, changed
from tests.algorithms.trl_trainers import grpo as grpo  # The fixture.

if TYPE_CHECKING:
    from trl import GRPOTrainer

torch.set_num_threads(1)

LEVELS = {"token": "token", "sequence": "sequence_product"}


def batch_of_floats(seed: int) -> SimpleNamespace:
    """A random batch with a response of the greatest length; TRL keeps the sampler's log-probabilities in float32."""
    batch = random_batch(seed)
    batch.lengths[0] = LONGEST
    batch.mask[0] = True
    batch.sampler = batch.sampler.float().double()
    return batch


def trl_weights(trainer: GRPOTrainer, batch: SimpleNamespace, mode: str, low: float | None, high: float) -> Any:
    """The weights that TRL gives the samples of a batch, [samples, tokens] or [samples, 1]."""
    rows = list(zip(batch.sampler.tolist(), batch.lengths, strict=True))
    completions = [[2] * length for length in batch.lengths]
    sampled = [row[:length] for row, length in rows]
    generated = ([[3]] * SAMPLES, completions, None, [""] * SAMPLES, sampled, {}, None, [])
    with changed(
        trainer,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *_: torch.zeros(SAMPLES, 1, dtype=torch.float64),
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.old, None, None),
    ):
        scored = trainer._generate_and_score_completions([{"prompt": "w2"}] * SAMPLES)
    return scored["importance_sampling_ratio"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("low", "high"), [(None, 1.3), (0.7, 1.3), (0.9, 3.0)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_and_loss_are_trl_s(
    grpo: GRPOTrainer, mode: Any, level: str, low: float | None, high: float, seed: int
) -> None:
    batch = batch_of_floats(seed)
    theirs = trl_weights(grpo, batch, f"{level}_{mode}", low, high)
    settings = ImportanceSamplingSettings(mode=mode, level=LEVELS[level], low=low, high=high)
    ours = correction_weights(sampler_ratio(batch.old, batch.sampler, batch.mask, settings.level), settings)
    counted = batch.mask if level == "token" else torch.ones(SAMPLES, 1, dtype=torch.bool)
    assert_same(f"importance weights, {level}_{mode}", ours[counted], theirs[counted])

    with changed(grpo, use_vllm=True, vllm_importance_sampling_correction=True, loss_type="dapo"):
        expected = trl_loss(grpo, batch, old_per_token_logps=batch.old, importance_sampling_ratio=theirs)
    algorithm = AlgorithmSettings(importance_sampling=settings)
    assert_equal(
        "importance correction in the loss", our_loss(algorithm, batch, sampler_log_probs=batch.sampler), expected
    )

    statistics = policy_loss(
        algorithm,
        log_probs=batch.log_probs,
        advantages=batch.advantages[:, None].expand(batch.mask.shape),
        mask=batch.mask,
        old_log_probs=batch.old,
        sampler_log_probs=batch.sampler,
    ).statistics
    touched = (theirs == (0 if mode == "mask" else high)).expand(batch.mask.shape)
    if low is not None and mode == "truncate":
        touched = touched | (theirs == low).expand(batch.mask.shape)
    shares = summarize(statistics)
    share = shares["correction_high"] + shares.get("correction_low", 0.0)
    assert 0 < share < 1
    assert share == pytest.approx(touched[batch.mask].double().mean().item())


@pytest.mark.parametrize("seed", range(3))
def test_the_ratio_against_the_sampler_is_trl_s_where_it_recomputes_nothing(grpo: GRPOTrainer, seed: int) -> None:
    """TRL's asynchronous trainer has the engine's log-probabilities in the place of the old policy's."""
    batch = random_batch(seed)
    with changed(grpo, loss_type="dapo"):
        theirs = trl_loss(grpo, batch, old_per_token_logps=batch.sampler)
    algorithm = AlgorithmSettings(proximal_policy="sampler")
    ours = our_loss(algorithm, batch, sampler_log_probs=batch.sampler)
    assert_equal("grpo objective, clipped against the sampler", ours, theirs)
