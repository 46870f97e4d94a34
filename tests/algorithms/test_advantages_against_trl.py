"""Advantages equal those of TRL, whose trainers run here and score completions that are put into their mouths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_functions.algorithms.advantages import estimate_advantages
from rlhfless_functions.settings import AlgorithmSettings, KlSettings
from tests.algorithms.differences import assert_same
from tests.algorithms.trl_trainers import GROUP, changed, is_grpo
from tests.algorithms.trl_trainers import grpo as grpo  # The fixtures.
from tests.algorithms.trl_trainers import rloo as rloo

if TYPE_CHECKING:
    from trl import GRPOTrainer, RLOOTrainer

torch.set_num_threads(1)

rewards_of_two_groups = st.lists(
    st.one_of(st.none(), st.sampled_from([0.0, 0.1, 1.0]), st.floats(-5, 5, width=32)),
    min_size=2 * GROUP,
    max_size=2 * GROUP,
)


def trl_advantages(
    trainer: GRPOTrainer | RLOOTrainer, rewards: list[float | None], **log_probs: torch.Tensor
) -> torch.Tensor:
    """TRL's advantages [samples] when its rewards are these; `log_probs` are `old` and `reference`."""
    completions = [[2 + index % 5] * (1 + index % 3) for index in range(len(rewards))]
    head = [[3]] * len(rewards), completions
    if is_grpo(trainer):
        generated = (*head, None, [""] * len(rewards), None, {}, None, [])
    else:
        generated = (*head, [""] * len(rewards))
    scored = torch.tensor([[torch.nan if reward is None else reward] for reward in rewards], dtype=torch.float64)
    passes = iter([log_probs.get("old"), log_probs.get("reference")])
    with changed(
        trainer,
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *_: scored,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            next(passes) if log_probs else torch.zeros(len(rewards), 3),
            None,
            None,
        ),
    ):
        return trainer._generate_and_score_completions([{"prompt": "w2"}] * len(rewards))["advantages"]


def our_advantages(algorithm: AlgorithmSettings, rewards: list[float | None], **tensors: torch.Tensor) -> torch.Tensor:
    groups = []
    for start in (0, GROUP):
        rows = slice(start, start + GROUP)
        mask = torch.arange(3) < torch.tensor([1 + index % 3 for index in range(2 * GROUP)])[rows, None]
        part = {name: value[rows] for name, value in tensors.items()}
        groups.append(estimate_advantages(algorithm, rewards[rows], mask, **part).advantages[:, 0])
    return torch.cat(groups)


compared = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@compared
@given(rewards=rewards_of_two_groups)
def test_group_advantages_are_trl_s(grpo: GRPOTrainer, rewards: list[float | None]) -> None:
    ours = our_advantages(AlgorithmSettings(name="grpo"), rewards)
    # TRL computes n / (n − 1) in float32 whatever the rewards are in.
    assert_same("group advantages, in TRL's float32", ours, trl_advantages(grpo, rewards), rtol=1e-6, atol=1e-6)


@compared
@given(rewards=rewards_of_two_groups)
def test_unscaled_advantages_are_trl_s(grpo: GRPOTrainer, rewards: list[float | None]) -> None:
    with changed(grpo, scale_rewards="none"):
        theirs = trl_advantages(grpo, rewards)
    ours = our_advantages(AlgorithmSettings(name="dr_grpo"), rewards)
    assert_same("group advantages, not scaled", ours, theirs, rtol=1e-9, atol=1e-9)


@compared
@given(rewards=rewards_of_two_groups)
def test_leave_one_out_advantages_are_trl_s(rloo: RLOOTrainer, rewards: list[float | None]) -> None:
    ours = our_advantages(AlgorithmSettings(name="rloo"), rewards)
    assert_same("leave-one-out advantages", ours, trl_advantages(rloo, rewards), rtol=1e-9, atol=1e-9)


def test_kl_in_the_reward_of_rloo_is_trl_s(rloo: RLOOTrainer) -> None:
    generator = torch.Generator().manual_seed(5)
    old, reference = torch.randn(2, 2 * GROUP, 3, generator=generator, dtype=torch.float64)
    rewards = [1.0, 0.0, 0.5, None, 0.25, 1.0, 1.0, 0.0]
    with changed(rloo, beta=0.2, ref_model=rloo.model):
        theirs = trl_advantages(rloo, rewards, old=old, reference=reference)
    kl = KlSettings(coefficient=0.2, placement="reward")
    ours = our_advantages(AlgorithmSettings(name="rloo", kl=kl), rewards, log_probs=old, reference_log_probs=reference)
    assert_same("KL in the reward, rloo", ours, theirs, rtol=1e-9, atol=1e-9)
