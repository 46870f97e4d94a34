"""The comparison: each system tuned, rows that agree with the runs they stand for, and what can't be simulated."""

import dataclasses
import io
from statistics import fmean

import pytest
from rich.console import Console

from rlhfless_operator.simulator.asynchronous.compare import (
    SYNCHRONOUS,
    compare,
    run_synchronous,
    run_system,
    splits,
    table,
    tune,
)
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS, Rollouts, Split
from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.simulate import simulate
from tests.simulator.small_scenario import SMALL

FEW = {name: SYSTEMS[name] for name in ("areal-1", "rlhfless-async-1")}


def test_names_are_those_of_the_policies_and_others() -> None:
    assert set(SYNCHRONOUS) <= set(POLICIES)
    # In synchronous steps Laminar does something else.
    assert set(SYSTEMS) & set(POLICIES) == {"laminar"}
    assert all(system.name == name for name, system in SYSTEMS.items())


def test_rows_are_means_over_whole_runs_beside_synchronous_steps() -> None:
    result = compare(SMALL, [0, 1], systems=FEW, steps=3)
    rows = {row["policy"]: row for row in result["policies"]}
    assert list(rows) == [*SYNCHRONOUS, *FEW]
    scenario = dataclasses.replace(SMALL, epochs=3)
    static = [fmean(step.seconds for step in run_synchronous(scenario, "static", scenario.draw_trace(seed), seed, 3))
              for seed in (0, 1)]  # fmt: skip
    assert rows["static"]["seconds"] == pytest.approx(fmean(static))
    split = Split(**rows["areal-1"]["split"])
    runs = [run_system(scenario, SYSTEMS["areal-1"], split, scenario.draw_trace(seed), seed, 3) for seed in (0, 1)]
    assert rows["areal-1"]["seconds"] == pytest.approx(fmean(run.seconds / 3 for run in runs))
    assert rows["areal-1"]["steps_an_hour"] == pytest.approx(3600 / rows["areal-1"]["seconds"])
    assert rows["areal-1"]["most_stale"] == max(max(run.staleness) for run in runs)
    for row in rows.values():
        assert 0 < row["of_cluster_bound"] <= row["of_bound"] * (1 + 1e-9) <= 1 + 1e-6


def test_synchronous_rows_are_those_of_the_other_comparison() -> None:
    result = compare(SMALL, [0], systems={}, steps=SMALL.epochs)
    other = simulate(SMALL, [0], policies=["rlhfless"])["policies"][0]
    mean = (other["seconds"] * (SMALL.epochs - 1) + other["first_epoch"]["seconds"]) / SMALL.epochs
    assert result["policies"][1]["seconds"] == pytest.approx(mean)


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_neighbour_is_better_than_the_tuned_split(name: str) -> None:
    system, trace = SYSTEMS[name], SMALL.draw_trace(0)
    static = run_synchronous(SMALL, "static", trace, 0, 2)
    time, cost = sum(step.seconds for step in static), sum(step.gpu_seconds for step in static)

    def badness(split: Split) -> float:
        outcome = run_system(SMALL, system, split, trace, 0, 2)
        return outcome.seconds / time + outcome.gpu_seconds / cost

    tuned = tune(SMALL, system, trace, 0, 2, static=static)
    every = splits(SMALL, system)
    place = [split.instances for split in every].index(tuned.instances)
    for split in every[max(0, place - 1) : place + 2]:
        assert badness(tuned) <= badness(split) * (1 + 1e-9)


def test_splits_use_all_gpus_and_leave_preparers_their_own() -> None:
    for system in SYSTEMS.values():
        for split in splits(SMALL, system):
            assert split.instances + split.learner_gpus + split.preparers == SMALL.gpus
            assert (split.preparers > 0) == (isinstance(system, Rollouts) and system.preparers > 0)


def test_a_cluster_without_room_for_all_stages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gpus is 2: rlhfless-async-1 .* the least is 3"):
        splits(dataclasses.replace(SMALL, gpus=2), SYSTEMS["rlhfless-async-1"])


def test_no_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="seeds is empty"):
        compare(SMALL, [])


def test_the_table_has_every_policy() -> None:
    result = compare(SMALL, [0], systems=FEW, steps=2)
    out = io.StringIO()
    Console(file=out, width=200).print(table(result))
    assert all(name in out.getvalue() for name in ("static", "areal-1", "rlhfless-async-1", "steps an hour"))
