"""Each reward normalised by itself (GDPO): against TRL's `normalize_then_sum`, and what a sum would lose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_functions.algorithms.advantages import estimate_advantages, normalize_samples
from rlhfless_functions.settings import AlgorithmSettings
from tests.algorithms.trl_trainers import GROUP, changed
from tests.algorithms.trl_trainers import grpo as grpo  # The fixture.

if TYPE_CHECKING:
    from trl import GRPOTrainer

torch.set_num_threads(1)
GDPO = AlgorithmSettings(advantage_normalization="group_per_reward")
WEIGHTS = [1.0, 0.5, -2.0]

scores = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 1.0]), st.floats(-5, 5, width=32))
terms_of_two_groups = st.lists(
    st.lists(scores, min_size=len(WEIGHTS), max_size=len(WEIGHTS)), min_size=2 * GROUP, max_size=2 * GROUP
)


def summed(rows: list[list[float | None]], weights: list[float]) -> torch.Tensor:
    """The advantages [samples] of one group, before the batch's normalisation."""
    totals = [None if all(score is None for score in row) else 1.0 for row in rows]
    terms = [(weight, [row[number] for row in rows]) for number, weight in enumerate(weights)]
    mask = torch.ones(len(rows), 1, dtype=torch.bool)
    return estimate_advantages(GDPO, totals, mask, terms=terms).advantages[:, 0]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=terms_of_two_groups)
def test_advantages_are_those_of_trl(grpo: GRPOTrainer, rows: list[list[float | None]]) -> None:
    completions = [[2 + index % 5] * (1 + index % 3) for index in range(len(rows))]
    generated = ([[3]] * len(rows), completions, None, [""] * len(rows), None, {}, None, [])
    scored = torch.tensor([[torch.nan if s is None else s for s in row] for row in rows], dtype=torch.float64)
    with changed(
        grpo,
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=torch.tensor(WEIGHTS, dtype=torch.float64),
        reward_funcs=[None] * len(WEIGHTS),
        reward_func_names=["a", "b", "c"],
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *_: scored,
        _get_per_token_logps_and_entropies=lambda *_, **__: (torch.zeros(len(rows), 3), None, None),
    ):
        theirs = grpo._generate_and_score_completions([{"prompt": "w2"}] * len(rows))["advantages"]
    ours = torch.cat([summed(rows[:GROUP], WEIGHTS), summed(rows[GROUP:], WEIGHTS)])
    scored = torch.tensor([any(score is not None for score in row) for row in rows])
    torch.testing.assert_close(normalize_samples(ours, scored), theirs.double(), rtol=1e-5, atol=1e-5)


def test_responses_with_equal_sums_stay_apart() -> None:
    rows: list[list[float | None]] = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    assert summed(rows, [1.0, 1.0]).abs().max() < 1e-9
    unequal: list[list[float | None]] = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.0]]
    advantages = summed(unequal, [1.0, 1.0])
    # As sums the first two are one and the same; the one that has the rarer fault is the worse.
    assert advantages[0] < advantages[1] < advantages[2]


def test_a_rare_reward_counts_as_much_as_a_large_one() -> None:
    rows: list[list[float | None]] = [[100.0, 0.0], [0.0, 1.0], [100.0, 0.0], [0.0, 1.0]]
    assert summed(rows, [1.0, 1.0]).tolist() == pytest.approx([0.0] * 4, abs=1e-3)


def test_a_constant_reward_adds_exactly_nothing() -> None:
    rows: list[list[float | None]] = [[0.1, 1.0], [0.1, 0.0], [0.1, None]]
    alone: list[list[float | None]] = [[1.0], [0.0], [None]]
    assert torch.equal(summed(rows, [3.0, 1.0])[:2], summed(alone, [1.0])[:2])
    assert summed(rows, [3.0, 1.0])[2] == 0
