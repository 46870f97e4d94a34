"""Drafting in simulation: faster steps for all policies that draft, and none below the bound."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.drafting import DraftedLatency, Drafts
from rlhfless_operator.planner.moves.rules import Saving
from rlhfless_operator.planner.step.bounds import lower_bound
from rlhfless_operator.simulator.assumptions import Assumptions, assume
from rlhfless_operator.simulator.generation import Handling, run_generation
from rlhfless_operator.simulator.global_ratio import GlobalRatio
from rlhfless_operator.simulator.instance import Instance, Response
from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.simulate import simulate, simulate_variants
from tests.simulator.small_scenario import LATENCY, PROFILE, SMALL

DRAFTS = st.builds(Drafts, st.sampled_from((0.3, 1.0)), st.sampled_from((0.0, 0.5, 0.9)))
ROWS = dataclasses.replace(LATENCY, draft_seconds=0.0003)


@given(DRAFTS, st.integers(1, 3000))
@settings(max_examples=40, deadline=None)
def test_a_lone_response_takes_its_best_rounds(drafts: Drafts, length: int) -> None:
    latency = DraftedLatency(ROWS, drafts)
    instance = Instance("one", latency, 0.0, max_batch=8, kv_tokens=10**6)
    instance.add([Response(0, 0, 50, length)])
    seconds = instance.next_end() - 50 * ROWS.prefill_token_seconds
    line = latency.at(1, 50)
    assert seconds == pytest.approx(length * line.step_seconds + line.sequence_work(50, length))
    assert [key for _, key in instance.advance(instance.next_end())] == [(0, 0)]


@given(
    st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=8), min_size=1, max_size=4),
    DRAFTS,
    st.sampled_from(("none", "global", "saving")),
)
@settings(max_examples=40, deadline=None)
def test_nobody_who_drafts_beats_the_bound(shares: list[list[int]], drafts: Drafts, name: str) -> None:
    latency = DraftedLatency(ROWS, drafts)
    numbers = iter(range(1000))
    given_out = [[Response(next(numbers), 0, 50, length) for length in lengths] for lengths in shares]
    truth = {each.key: each.length for share in given_out for each in share}
    rules = {
        "none": None,
        "global": GlobalRatio(0.7, 64, samples=len(truth)),
        "saving": Saving(latency, 64, period=0.2, pause_seconds=0.05, time_price=0.1),
    }
    handling = Handling(rules[name], tick_seconds=0.2, ready_seconds=3.0)
    profile = dataclasses.replace(PROFILE, latency=latency)
    run = run_generation(given_out, profile, lambda key, tokens: (truth[key] - tokens, 0.0), handling, max_batch=64)
    assert set(run.ends) == set(truth)
    bound = lower_bound(
        np.array(list(truth.values()), dtype=float), np.full(len(truth), 50.0), latency, run.seconds,
        prefill_tokens=50.0 * len(truth), start_seconds=3.0, max_batch=64,
    )  # fmt: skip
    assert bound <= sum(each.end - each.begin for each in run.held) * (1 + 1e-9)


def test_everybody_is_faster_with_drafts_and_baselines_may_have_them_too() -> None:
    scenario = dataclasses.replace(SMALL, prompts_per_step=24, drafts=Drafts(1.0, 0.8))
    variants = {
        f"{name}{' without drafts' if not drafts else ''}": dataclasses.replace(POLICIES[name], drafts=drafts)
        for name in ("static", "paper", "rlhfless")
        for drafts in (False, True)
    }
    rows = {row["policy"]: row for row in simulate_variants(scenario, [0], variants)["policies"]}
    for name in ("static", "paper", "rlhfless"):
        assert rows[name]["seconds"] < rows[f"{name} without drafts"]["seconds"]
        assert 0 < rows[name]["lower_bound_share"] <= 1
    # The first epoch knows nothing to draft from.
    first = rows["static"]["first_epoch"]["seconds"]
    assert first == pytest.approx(rows["static without drafts"]["first_epoch"]["seconds"])
    # A static actor without drafts takes what it takes in a scenario that has none.
    (plain,) = simulate(SMALL, [0], policies=["static"])["policies"]
    without = dataclasses.replace(POLICIES["static"], drafts=False)
    same = simulate_variants(dataclasses.replace(SMALL, drafts=Drafts(1.0, 0.8)), [0], {"static": without})
    assert same["policies"][0]["seconds"] == pytest.approx(plain["seconds"])


def test_an_assumed_acceptance_makes_everybody_draft() -> None:
    assert assume(SMALL, Assumptions()).drafts is None
    assert assume(SMALL, Assumptions(acceptance=0.6)).drafts == Drafts(1.0, 0.6)
    with pytest.raises(ValueError, match=r"acceptance is 1\.2: a share is between 0 and 1"):
        assume(SMALL, Assumptions(acceptance=1.2))
