"""What plans count an instance of a stage as."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.training.costs.generation_plan import holding_of, idle_seconds, price_of, training_of


def gpus(count: int) -> dict[str, Any]:
    return {"pods": {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}}


ON_GPUS: dict[str, Any] = {"generation": gpus(2), "preparation": gpus(1), "learning": {**gpus(4), "processes": 4}}


@pytest.mark.parametrize(
    ("spec", "prices"),
    [
        ({}, (1.0, 1.0)),
        (ON_GPUS, (0.5, 2.0)),
        ({**ON_GPUS, "prices": {"instanceHour": "3"}}, (1.0, 1.0)),
        ({**ON_GPUS, "prices": {"stages": {"generation": "1", "preparation": "3", "learning": "5"}}}, (3.0, 5.0)),
    ],
    ids=["no GPUs", "GPUs", "the same price", "other prices"],
)
def test_an_instance_counts_by_its_price_and_by_its_gpus_where_there_is_none(
    spec: dict[str, Any], prices: tuple[float, float], tiny_job: Callable[..., Path]
) -> None:
    job = load_job(tiny_job(**{"prices": {"instanceHour": "0"}, **spec})).spec
    assert (price_of(job, "preparation"), price_of(job, "learning")) == prices


def test_nothing_is_held_before_a_step_was_learnt_and_a_start_that_learning_hides_makes_nothing_late(
    tiny_job: Callable[..., Path],
) -> None:
    job, history = load_job(tiny_job()).spec, History()
    there, switches = (
        dict.fromkeys(("generation", "preparation", "learning"), 1),
        dict.fromkeys(("generation", "preparation", "learning"), 9.0),
    )
    history.add("startup/generation", 30.0)
    assert holding_of(job, history, there, switches) is None  # type: ignore[arg-type]
    for learning, late in ((8.0, 22.0), (92.0, 0.0)):
        history.add("learning", learning)
        holding = holding_of(job, history, there, switches)  # type: ignore[arg-type]
        assert holding is not None
        assert holding.late_seconds == late
    # Actors are asked for when the batch is prepared, and a learner that follows has learnt from most of it then.
    history.add("learning/beyond", 6.0)
    holding = holding_of(job, history, there, switches)  # type: ignore[arg-type]
    assert holding is not None
    assert holding.late_seconds == 24.0


def test_one_more_preparer_costs_its_start_and_its_models(tiny_job: Callable[..., Path]) -> None:
    job, history = load_job(tiny_job()).spec, History()
    for name, seconds in {"startup/preparation": 2.0, "preparation/load": 3.0, "waking/preparation": 0.1}.items():
        history.add(name, seconds)
    given = job, history, [], ActorRange(1, 4)
    apart = training_of(*given, follows=False)
    assert (apart.preparer_start_seconds, apart.preparer_idle_seconds) == (0.0, 5.0), "a forecast hides the start"
    in_turns = training_of(*given, follows=False, shared=SharedGpus(4, {"generation": 1, "preparation": 1}))
    assert in_turns.preparer_start_seconds == 3.0, "whether it is awake meanwhile or not"
    assert idle_seconds(history, "learning") == 0.0
