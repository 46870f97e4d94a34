"""The live migration: which rule a job's document means, and what is expected of a response on the way."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import LearnResult, WeightsReference
from rlhfless_operator.job.actor_range import actor_range
from rlhfless_operator.job.reading.validation import InvalidJobError, load_job
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.lengths import LengthPredictor
from rlhfless_operator.planner.moves.migration import Migration
from rlhfless_operator.planner.moves.rules import ActorRatio, Repack, Saving, WaitingLearner
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.training.costs.cost_model import CostModel
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.costs.live_migration import open_migration

GROWN = 16
"""Twice the largest share: an actor's batch grows no further (`slots` is 256)."""
LATENCY = LinearLatency(0.010, 40e-6, 50e-9, 20e-6)


def plan_of(spec: RLHFJobSpec, prompts: list[int]) -> GenerationPlan:
    cost_model = CostModel(spec, actor_range(spec), latency=LATENCY)
    cost_model.predictor = LengthPredictor(default_tokens=10, longest=24)
    return cost_model.plan(prompts, 4, [5] * 12, known=True)


def migration_of(file: Path, *, pause_seconds: float = 0.1) -> Migration:
    spec = load_job(file).spec
    plan = plan_of(spec, [0, 1, 2, 3])
    return open_migration(spec, plan, LATENCY, pause_seconds=pause_seconds)


@pytest.mark.parametrize(
    ("settings", "rule", "numbers"),
    [
        ({"policy": "none"}, type(None), {}),
        ({"policy": "threshold"}, ActorRatio, {"ratio": 0.95, "slots": GROWN}),
        ({"policy": "threshold", "ratio": 0.0, "slots": 4}, ActorRatio, {"ratio": 0.0, "slots": 4}),
        ({"policy": "repack", "period": "5s"}, Repack, {"roofline_batch": GROWN, "period": 5.0}),
        ({}, Saving, {"hysteresis": 0.25, "longest": 24, "pause_seconds": 0.1, "restarts_receiver": False}),
        ({"policy": "benefit", "hysteresis": 2.0}, Saving, {"hysteresis": 2.0, "kv_tokens": math.inf}),
    ],
)
def test_each_policy_is_its_rule_with_the_numbers_of_the_document(
    tiny_job: Callable[..., Path], settings: dict[str, Any], rule: type, numbers: dict[str, Any]
) -> None:
    found = migration_of(tiny_job(planning={"migration": settings}))._rule
    assert isinstance(found, rule)
    assert {name: getattr(found, name) for name in numbers} == numbers


def test_a_step_is_worth_more_the_less_cost_weighs(tiny_job: Callable[..., Path]) -> None:
    prices = [migration_of(tiny_job(planning={"lambda": weight}))._rule.time_price for weight in (0.0, 0.5, 1.0)]
    assert prices[0] > prices[1] > prices[2] == 0


def test_what_remains_is_conditioned_on_what_there_is_already(tiny_job: Callable[..., Path]) -> None:
    migration = migration_of(tiny_job())
    migration.assigned("a", {(0, 0): 5, (0, 1): 5})
    migration.progressed("a", {(0, 0): 23})
    migration.assess()
    samples = migration.actors["a"].samples
    assert samples[0, 0].remaining <= 1 < samples[0, 1].remaining


def test_the_moves_of_a_step_know_that_a_learner_waits_for_the_gpus_of_actors(tiny_job: Callable[..., Path]) -> None:
    spec = load_job(tiny_job(planning={"policy": "cost"}, generation={"instances": {"min": 2, "max": 2}})).spec
    metrics = {"seconds": 90.0, "seconds/train": 80.0, "tokens": 200.0}

    def learner(shared: SharedGpus | None, *, follows: bool) -> WaitingLearner | None:
        cost_model = CostModel(spec, actor_range(spec), shared=shared)
        cost_model.learned(LearnResult(weights=WeightsReference(version=1, uri="w"), metrics=metrics))
        cost_model.history.add("waking/learning", 3.0)
        plan = cost_model.plan([0, 1, 2], 4, [5] * 12, known=True, follows=follows)
        rule = cost_model.open_migration(plan)._rule
        assert isinstance(rule, Saving)
        return rule.learner

    few = SharedGpus(2, {"generation": 1, "preparation": 0, "learning": 1})
    waiting = learner(few, follows=True)
    assert waiting is not None and waiting.actors == 1
    assert waiting.seconds > 3.0
    assert learner(few, follows=False) is None
    assert learner(None, follows=True) is None


def test_a_ratio_that_is_none_is_refused_with_its_field(tiny_job: Callable[..., Path]) -> None:
    with pytest.raises(InvalidJobError, match=r"planning\.migration\.ratio"):
        load_job(tiny_job(planning={"migration": {"policy": "threshold", "ratio": 1.5}}))
