"""Losses and gradients equal those of TRL, whose trainers run here.

A trainer's loss is differentiated by log-probabilities that are put in place of its model's. One test goes through both
libraries' models, to the gradients of the parameters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rlhfless_functions.algorithms.aggregation import normalizer
from rlhfless_functions.algorithms.diagnostics import summarize
from rlhfless_functions.algorithms.objectives import policy_loss
from rlhfless_functions.model.forward import collate, response_log_probs
from rlhfless_functions.settings import AlgorithmSettings, ImportanceSamplingSettings, KlSettings
from tests.algorithms.differences import assert_same
from tests.algorithms.trl_trainers import LONGEST, SAMPLES, VOCABULARY, changed, is_grpo, tiny_model
from tests.algorithms.trl_trainers import grpo as grpo  # The fixtures.
from tests.algorithms.trl_trainers import rloo as rloo

if TYPE_CHECKING:
    from trl import GRPOTrainer, RLOOTrainer

torch.set_num_threads(1)


def random_batch(seed: int) -> SimpleNamespace:
    """Ragged responses whose policy has moved far enough from the old one for every clip to bite."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(SAMPLES, LONGEST, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (SAMPLES,), generator=generator)
    sampler = -noise(1.0).abs()
    old = sampler + noise(0.4)
    return SimpleNamespace(
        mask=torch.arange(LONGEST) < lengths[:, None],
        lengths=lengths.tolist(),
        sampler=sampler,
        old=old,
        log_probs=old + noise(0.3),
        reference=old + noise(0.3),
        entropy=noise(1.0).abs(),
        advantages=torch.randn(SAMPLES, generator=generator, dtype=torch.float64),
    )


def trl_loss(
    trainer: GRPOTrainer | RLOOTrainer, batch: SimpleNamespace, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's loss of the whole batch, and its gradient by the log-probabilities; two micro-batches, accumulated."""
    leaf = batch.log_probs.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    grpo_weighs_parts_itself = is_grpo(trainer)
    for rows in (slice(0, SAMPLES // 2), slice(SAMPLES // 2, SAMPLES)):
        part = {
            "prompt_ids": torch.ones(SAMPLES // 2, 1, dtype=torch.long),
            "prompt_mask": torch.ones(SAMPLES // 2, 1, dtype=torch.long),
            "completion_ids": torch.zeros(SAMPLES // 2, LONGEST, dtype=torch.long),
            "completion_mask": batch.mask[rows].long(),
            "advantages": batch.advantages[rows],
            "num_items_in_batch": batch.mask.sum(),
            **{name: value[rows] for name, value in inputs.items()},
        }
        scored = (leaf[rows], batch.entropy[rows], None)
        with changed(
            trainer,
            _get_per_token_logps_and_entropies=lambda *_, scored=scored, **__: scored,
            current_gradient_accumulation_steps=2,
        ):
            loss = trainer._compute_loss(trainer.model, part)
        total = total + (loss if grpo_weighs_parts_itself else loss / 2)
    total.backward()
    return total.detach(), leaf.grad


def our_loss(algorithm: AlgorithmSettings, batch: SimpleNamespace, **tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours of the same batch, in micro-batches of three."""
    leaf = batch.log_probs.clone().requires_grad_()
    whole = {
        "log_probs": leaf,
        "advantages": batch.advantages[:, None].expand(batch.mask.shape),
        "mask": batch.mask,
        "old_log_probs": batch.old,
        "entropy": batch.entropy,
        **tensors,
    }
    divisor = normalizer(batch.lengths, algorithm.resolved().aggregation, LONGEST)
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, SAMPLES, 3):
        part = {name: value[start : start + 3] for name, value in whole.items()}
        total = total + policy_loss(algorithm, **part).total / divisor
    total.backward()
    return total.detach(), leaf.grad


def assert_equal(
    check: str, ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for what, one, other in zip(("loss", "gradient"), ours, theirs, strict=True):
        assert_same(f"{check}, {what}", one, other)


GRPO_FAMILY = {
    "grpo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},
}


@pytest.mark.parametrize("name", GRPO_FAMILY)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_trl(grpo: GRPOTrainer, name: Any, seed: int) -> None:
    batch = random_batch(seed)
    with changed(grpo, **GRPO_FAMILY[name]):
        theirs = trl_loss(grpo, batch, old_per_token_logps=batch.old)
    assert_equal(f"{name} objective", our_loss(AlgorithmSettings(name=name), batch), theirs)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drifted", [True, False])
def test_sapo_is_trl_s(grpo: GRPOTrainer, drifted: bool, seed: int) -> None:
    """With a temperature that is no other number in float32, in which TRL keeps it."""
    batch = random_batch(seed)
    if not drifted:
        batch.old = batch.log_probs
    with changed(grpo, loss_type="sapo"), changed(grpo.args, sapo_temperature_neg=1.25):
        theirs = trl_loss(grpo, batch, old_per_token_logps=batch.old)
    algorithm = AlgorithmSettings(name="sapo", sapo_temperature_negative=1.25)
    assert_equal("sapo objective", our_loss(algorithm, batch), theirs)
    assert (grpo.args.sapo_temperature_pos, grpo.args.sapo_temperature_neg) == (1.0, 1.05), "which are our defaults"


@pytest.mark.parametrize("seed", range(5))
def test_sequence_mean_of_grpo_as_published(grpo: GRPOTrainer, seed: int) -> None:
    batch = random_batch(seed)
    with changed(grpo, loss_type="grpo"):
        theirs = trl_loss(grpo, batch, old_per_token_logps=batch.old)
    ours = our_loss(AlgorithmSettings(aggregation="seq-mean-token-mean"), batch)
    assert_equal("grpo objective, seq-mean-token-mean", ours, theirs)


@pytest.mark.parametrize("seed", range(5))
def test_samples_that_are_masked_change_nothing_of_dr_grpo_s_step(grpo: GRPOTrainer, seed: int) -> None:
    """Truncated and unscorable samples are masked whole; the constant divisor still counts them."""
    batch = random_batch(seed)
    masked = torch.tensor([False, True, False, False, True, True, False, False])
    batch.mask, batch.lengths = without(batch, masked)
    with changed(grpo, **GRPO_FAMILY["dr_grpo"]):
        theirs = trl_loss(grpo, batch, old_per_token_logps=batch.old)
    ours = our_loss(AlgorithmSettings(name="dr_grpo"), batch)
    assert_equal("dr_grpo objective with masked samples", ours, theirs)
    scored_zero = random_batch(seed)
    scored_zero.advantages = scored_zero.advantages.masked_fill(masked, 0.0)
    torch.testing.assert_close(ours[1], our_loss(AlgorithmSettings(name="dr_grpo"), scored_zero)[1])


@pytest.mark.parametrize("name", GRPO_FAMILY)
@pytest.mark.parametrize("seed", range(5))
def test_given_tokens_are_trl_s_tool_tokens(grpo: GRPOTrainer, name: Any, seed: int) -> None:
    batch = random_batch(seed)
    tool_mask = torch.rand(SAMPLES, LONGEST, generator=torch.Generator().manual_seed(seed)) > 0.4
    tool_mask[:, 0] = True
    whole, batch.mask = batch.mask, batch.mask & tool_mask
    batch.lengths = batch.mask.sum(-1).tolist()
    padded = {"completion_mask": whole.long(), "tool_mask": torch.where(whole, tool_mask, True).long()}
    with changed(grpo, **GRPO_FAMILY[name]):
        theirs = trl_loss(grpo, batch, old_per_token_logps=batch.old, **padded)
    assert not theirs[1][~batch.mask].any()
    assert_equal(f"{name} objective with tools", our_loss(AlgorithmSettings(name=name), batch), theirs)


def without(batch: SimpleNamespace, masked: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Mask and lengths of a batch some of whose samples are left out of the loss."""
    mask = batch.mask & ~masked[:, None]
    return mask, mask.sum(-1).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_rloo_takes_a_response_as_one_action(rloo: RLOOTrainer, seed: int) -> None:
    batch = random_batch(seed)
    batch.old = batch.log_probs + 0.1 * (batch.old - batch.log_probs)  # products of ratios on both sides of the clip
    theirs = trl_loss(rloo, batch, old_logps=(batch.old * batch.mask).sum(-1))
    assert_equal("rloo objective", our_loss(AlgorithmSettings(name="rloo"), batch), theirs)


@pytest.mark.parametrize("name", GRPO_FAMILY)
def test_first_update_needs_no_old_log_probs(grpo: GRPOTrainer, name: Any) -> None:
    batch = random_batch(7)
    with changed(grpo, **GRPO_FAMILY[name]):
        theirs = trl_loss(grpo, batch)
    algorithm = AlgorithmSettings(name=name)
    leaf = batch.log_probs.clone().requires_grad_()
    loss = policy_loss(
        algorithm, log_probs=leaf, advantages=batch.advantages[:, None].expand(batch.mask.shape), mask=batch.mask
    )
    total = loss.total / normalizer(batch.lengths, algorithm.resolved().aggregation, LONGEST)
    total.backward()
    assert_equal(f"{name} objective", (total.detach(), leaf.grad), theirs)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_importance_weighted_k3_is_trl_s_bias_corrected_kl(grpo: GRPOTrainer, name: Any) -> None:
    batch = random_batch(11)
    with changed(grpo, beta=0.3, **GRPO_FAMILY[name]):
        assert grpo.args.use_bias_correction_kl
        theirs = trl_loss(grpo, batch, old_per_token_logps=batch.old, ref_per_token_logps=batch.reference)
    algorithm = AlgorithmSettings(name=name, kl=KlSettings(coefficient=0.3, estimator="k3"))
    ours = our_loss(algorithm, batch, reference_log_probs=batch.reference)
    assert_equal("KL in the loss, weighted k3", ours, theirs)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("cap", [0.8, 2.0])
def test_truncated_importance_sampling_is_trl_s(grpo: GRPOTrainer, name: Any, cap: float) -> None:
    batch = random_batch(13)
    weights = torch.exp((batch.old - batch.sampler) * batch.mask).clamp(max=cap)
    with changed(grpo, use_vllm=True, vllm_importance_sampling_correction=True, **GRPO_FAMILY[name]):
        theirs = trl_loss(grpo, batch, old_per_token_logps=batch.old, importance_sampling_ratio=weights)
    algorithm = AlgorithmSettings(name=name, importance_sampling=ImportanceSamplingSettings(high=cap))
    ours = our_loss(algorithm, batch, sampler_log_probs=batch.sampler)
    assert_equal("importance correction in the loss", ours, theirs)


def test_dual_clip_is_trl_s_delta(grpo: GRPOTrainer) -> None:
    batch = random_batch(17)
    with changed(grpo, loss_type="dapo"), changed(grpo.args, delta=1.3):
        theirs = trl_loss(grpo, batch, old_per_token_logps=batch.old)
    plain = our_loss(AlgorithmSettings(), batch)
    dual = our_loss(AlgorithmSettings(dual_clip=1.3), batch)
    assert not torch.equal(plain[1], dual[1])
    assert_equal("dual clip", dual, theirs)


def test_clip_shares_are_trl_s(grpo: GRPOTrainer) -> None:
    batch = random_batch(19)
    grpo._metrics["train"].clear()
    with changed(grpo, loss_type="dapo"):
        trl_loss(grpo, batch, old_per_token_logps=batch.old)
    tokens = torch.tensor([sum(batch.lengths[:4]), sum(batch.lengths[4:])], dtype=torch.float64)
    ours = summarize(
        policy_loss(
            AlgorithmSettings(),
            log_probs=batch.log_probs,
            advantages=batch.advantages[:, None].expand(batch.mask.shape),
            mask=batch.mask,
            old_log_probs=batch.old,
            entropy=batch.entropy,
        ).statistics
    )
    names = {"clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean", "entropy": "entropy"}
    for name, theirs in names.items():
        per_part = torch.tensor(grpo._metrics["train"][theirs], dtype=torch.float64)
        assert ours[name] > 0
        expected = (per_part * tokens).sum() / tokens.sum()
        one = torch.tensor(ours[name], dtype=torch.float64)
        assert_same("shares of clipped tokens, entropy", one, expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_parameter_gradients_through_both_models(grpo: GRPOTrainer, temperature: float) -> None:
    """Both in float32 from the head on. TRL pads prompts on the left, and ours has no padding before a response."""
    from trl.trainer.utils import add_fused_lm_head

    model = tiny_model().double()
    generator = torch.Generator().manual_seed(3)
    prompts = [[2, 3], [4, 5, 6], [7], [8, 9]]
    responses = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in (9, 1, 4, 6)]
    advantages = torch.randn(4, generator=generator, dtype=torch.float64)

    def padded(rows: list[list[int]], width: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            where = slice(width - len(row), None) if left else slice(0, len(row))
            ids[index, where], mask[index, where] = torch.tensor(row), 1
        return ids, mask

    prompt_ids, prompt_mask = padded(prompts, 3, left=True)
    completion_ids, completion_mask = padded(responses, LONGEST, left=False)
    theirs = tiny_model().double()
    add_fused_lm_head(theirs, temperature=temperature, outputs=("log_probs", "entropy"))
    with changed(grpo, model=theirs, loss_type="dapo", current_gradient_accumulation_steps=2):
        loss = grpo._compute_loss(
            theirs,
            {
                "prompt_ids": prompt_ids,
                "prompt_mask": prompt_mask,
                "completion_ids": completion_ids,
                "completion_mask": completion_mask,
                "advantages": advantages,
                "num_items_in_batch": completion_mask.sum(),
            },
        )
        loss.backward()

    batch = collate(prompts, responses, pad_id=0)
    log_probs, entropy = response_log_probs(model, batch, temperature, entropy=True)
    ours = policy_loss(
        AlgorithmSettings(),
        log_probs=log_probs,
        advantages=advantages[:, None].expand(4, LONGEST),
        mask=batch.response_mask,
        entropy=entropy,
    ).total / normalizer([9, 1, 4, 6], "token-mean", LONGEST)
    ours.backward()
    check = "the same through both models, float32"
    assert_same(f"{check}, loss", ours.detach().double(), loss.detach().double(), rtol=0, atol=1e-6)
    expected = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        assert_same(f"{check}, gradients", parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-6)
