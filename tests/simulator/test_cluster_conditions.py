"""What instances live in, option by option; each can be had by itself and is off by default."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from rlhfless_operator.simulator.cluster_conditions import ClusterConditions
from rlhfless_operator.simulator.generation import GenerationRun, Handling, run_generation
from rlhfless_operator.simulator.instance import Response
from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.simulate import simulate
from rlhfless_operator.simulator.steps import run_policy
from rlhfless_operator.simulator.traces import generate
from tests.simulator.small_scenario import LATENCY, PROFILE, SMALL


def stage(
    conditions: ClusterConditions | None = None, *, actors: int = 4, length: int = 2000, seed: int = 0, **options
) -> GenerationRun:
    shares = [[Response(10 * k + i, 0, 100, length) for i in range(3)] for k in range(actors)]
    return run_generation(
        shares, PROFILE, lambda key, tokens: (0, 0), Handling(ready_seconds=3.0), max_batch=64,
        random=np.random.default_rng(seed), conditions=conditions,
    )  # fmt: skip


def held_seconds(run: GenerationRun) -> float:
    return sum(each.end - each.begin for each in run.held)


def test_nothing_happens_unless_it_is_asked_for() -> None:
    assert stage(ClusterConditions()) == stage(None)
    plain = simulate(SMALL, [0], policies=["static", "rlhfless"])
    assert (
        simulate(dataclasses.replace(SMALL, conditions=ClusterConditions()), [0], policies=["static", "rlhfless"])
        == plain
    )


def test_a_node_that_fails_takes_all_of_its_instances_with_it() -> None:
    run = stage(ClusterConditions(node_instances=2, node_failures_per_hour=100.0), actors=6, seed=2)
    assert run.lost >= 2
    ends = sorted(each.end for each in run.held)
    together = [a for a, b in pairwise(ends) if a == b and a < run.seconds]
    assert together, "two instances of a node end at the same moment"
    assert len(run.ends) == 18


def test_an_instance_that_is_reclaimed_hands_over_all_that_it_has() -> None:
    calm, reclaimed = stage(), stage(ClusterConditions(spot_share=1.0, reclaims_per_hour=150.0))
    assert reclaimed.reclaimed > 0 and reclaimed.lost == 0
    # Nothing is generated twice: a move costs the prefill of what there is, and the notice covers the new start.
    per_move = 3 * 2100 * LATENCY.prefill_token_seconds
    assert reclaimed.seconds <= calm.seconds + reclaimed.reclaimed * per_move
    assert all(each.spot for each in reclaimed.held)


def test_without_notice_the_successor_is_awaited() -> None:
    conditions = ClusterConditions(spot_share=1.0, reclaims_per_hour=150.0)
    kind, harsh = stage(conditions), stage(dataclasses.replace(conditions, notice_seconds=0.0))
    assert harsh.seconds > kind.seconds


def test_cold_starts_delay_and_are_charged() -> None:
    warm, cold = stage(), stage(ClusterConditions(cold_share=1.0, cold_seconds=31.0))
    assert cold.seconds == pytest.approx(warm.seconds + 30)
    assert held_seconds(cold) == pytest.approx(held_seconds(warm) + 4 * 30)


def test_spot_capacity_costs_less_and_takes_as_long() -> None:
    trace = generate(SMALL.lengths, epochs=1, prompts=12, samples=4, seed=0)
    spot = dataclasses.replace(SMALL, conditions=ClusterConditions(spot_share=1.0, spot_price=0.4))
    (full,), (cheap,) = (run_policy(scenario, POLICIES["paper"], trace, 0) for scenario in (SMALL, spot))
    assert cheap.gpu_seconds == full.gpu_seconds == full.paid_gpu_seconds
    saved = 0.6 * sum(each.end - each.begin for each in cheap.held)
    assert cheap.paid_gpu_seconds == pytest.approx(full.paid_gpu_seconds - saved)
    (static,) = run_policy(spot, POLICIES["static"], trace, 0)
    assert static.paid_gpu_seconds == static.gpu_seconds, "what is held all the time is no spot capacity"


@pytest.mark.parametrize(
    ("conditions", "one", "many"),
    [
        (ClusterConditions(), 3.0, 3.0),
        (ClusterConditions(weights="store", store_gigabytes_per_second=10, link_gigabytes_per_second=4), 1.5, 9.6),
        (ClusterConditions(weights="relay", link_gigabytes_per_second=4, relay_blocks=30), 1.5, 2.25),
    ],
)
def test_weights_take_the_scenarios_time_or_what_the_network_allows(
    conditions: ClusterConditions, one: float, many: float
) -> None:
    assert conditions.weight_load_seconds(3.0, 6.0, 1) == pytest.approx(one)
    assert conditions.weight_load_seconds(3.0, 6.0, 16) == pytest.approx(many)


def test_fewer_instances_load_faster_from_a_shared_store() -> None:
    slow = dataclasses.replace(SMALL, conditions=ClusterConditions(weights="store", store_gigabytes_per_second=1.0))
    assert slow.loading_seconds(1) < slow.loading_seconds(4) == slow.profile().weight_load_seconds


def test_a_shared_prefix_is_computed_once_an_instance_or_once_and_sent() -> None:
    def busy(conditions: ClusterConditions, prompts: int = 6) -> list[float]:
        shares = [[Response(10 * k + i, 0, 1100, 50) for i in range(prompts)] for k in range(2)]
        run = run_generation(
            shares, PROFILE, lambda key, tokens: (0, 0), Handling(ready_seconds=3.0), max_batch=64,
            conditions=conditions, kv_gigabytes_per_token=36_864e-9,
        )  # fmt: skip
        return [each.busy for each in sorted(run.held, key=lambda each: each.name)]

    prefix = 1000
    none, cached, shipped = (
        busy(ClusterConditions(shared_prefix_tokens=prefix, prefixes=way)) for way in ("computed", "cached", "shipped")
    )
    seconds = prefix * LATENCY.prefill_token_seconds
    for each in range(2):
        assert none[each] - cached[each] == pytest.approx(5 * seconds)
    assert shipped[0] == pytest.approx(cached[0])
    assert cached[1] - shipped[1] == pytest.approx(seconds - prefix * 36_864e-9 / 4)


def test_no_policy_beats_the_bound_under_any_conditions() -> None:
    conditions = ClusterConditions(
        node_instances=2, node_failures_per_hour=20, spot_share=0.5, reclaims_per_hour=60, cold_share=0.2,
        weights="relay", shared_prefix_tokens=500, prefixes="shipped",
    )  # fmt: skip
    found = simulate(dataclasses.replace(SMALL, conditions=conditions, failures_per_hour=20), [0, 1])
    assert all(0 < row["lower_bound_share"] <= 1 for row in found["policies"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spot_share": 1.5}, "spot_share is 1.5"),
        ({"cold_seconds": -1.0}, "cold_seconds is -1"),
        ({"relay_blocks": 0}, "relay_blocks is 0"),
        ({"node_failures_per_hour": 1.0}, "node_instances is 0 where nodes fail"),
    ],
)
def test_conditions_that_cannot_be_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterConditions(**change)
