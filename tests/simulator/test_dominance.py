"""No rival is better than ours in both time and cost."""

import dataclasses
from typing import get_args

import pytest

from rlhfless_operator.simulator.policies import PolicyName
from rlhfless_operator.simulator.scenarios import SCENARIOS, Scenario
from rlhfless_operator.simulator.simulate import simulate
from tests.simulator.small_scenario import SMALL

MARGIN = 0.02
RIVALS = [name for name in get_args(PolicyName) if name not in ("oracle", "rlhfless")]


def who_dominates(scenario: Scenario, rivals: list[str]) -> list[str]:
    """Rivals that are better than ours in both by more than the margin."""
    rows = {row["policy"]: row for row in simulate(scenario, [0, 1], policies=[*rivals, "rlhfless"])["policies"]}
    ours = rows.pop("rlhfless")
    return [
        name
        for name, row in rows.items()
        if all(row[figure] < (1 - MARGIN) * ours[figure] for figure in ("seconds", "gpu_seconds"))
    ]


@pytest.mark.parametrize("cost_weight", [0.2, 0.8])
@pytest.mark.parametrize("longest", [600, 2400])
@pytest.mark.parametrize("runaways", [0.0, 0.03])
def test_no_rival_is_better_in_both(cost_weight: float, longest: int, runaways: float) -> None:
    lengths = dataclasses.replace(SMALL.lengths, longest=longest, runaways=runaways)
    scenario = dataclasses.replace(SMALL, prompts_per_step=24, epochs=3, cost_weight=cost_weight, lengths=lengths)
    assert who_dominates(scenario, RIVALS) == []


@pytest.mark.slow
def test_where_one_response_is_far_longer_than_the_rest_no_rival_is_better_in_both() -> None:
    """Without waiting in the forecast, a runaway among those who wait ended last: 140 s where the paper took 132."""
    best = SCENARIOS["paper-3b-gsm8k-grpo"]
    scenario = dataclasses.replace(best, lengths=dataclasses.replace(best.lengths, longest=8192))
    assert who_dominates(scenario, ["paper"]) == []
