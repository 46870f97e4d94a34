"""The simulator and real processes on emulated GPUs carry out the same plans alike."""

import json
from itertools import pairwise

import pytest

from benchmarks.shared.places import BENCHMARKS
from benchmarks.simulator.against_processes import ObservedStep, Side, compare
from benchmarks.simulator.rehearsal import Setting, simulated
from rlhfless_operator.simulator.traces import LengthStatistics


def step_of(policy: str) -> tuple[ObservedStep, Side, Side]:
    """(what the driver saw, processes, simulator) of a step on up to eight actors, four times as fast as in earnest."""
    lengths = LengthStatistics(median=150, longest=800, prompt_median=60, runaways=0.02)
    (step,) = compare(
        8, policy, statistics_of_lengths=lengths, prompts=48, samples=4, epochs=1, time_scale=0.25, startup=3.0
    )
    return step


@pytest.mark.slow
@pytest.mark.parametrize("policy", [pytest.param("even", marks=pytest.mark.nightly), "cost"])
def test_samples_end_in_the_simulators_order_and_no_sooner(policy: str) -> None:
    step, real, simulated = step_of(policy)
    assert real.ends.keys() == simulated.ends.keys()
    # A busy machine is late, never early: an emulated GPU takes the time that it would.
    assert all(real.ends[key] > 0.99 * simulated.ends[key] for key in real.ends)
    assert real.seconds > 0.99 * simulated.seconds
    assert real.gpu_seconds > 0.99 * simulated.gpu_seconds
    # When instances start is up to the machine; what one does after that is up to the plan.
    for share in step.shares:
        keys = sorted(((sample.prompt, sample.index) for sample in share), key=simulated.ends.__getitem__)
        for earlier, later in pairwise(keys):
            if simulated.ends[later] - simulated.ends[earlier] > 0.05:
                assert real.ends[earlier] <= real.ends[later]


@pytest.mark.slow
def test_samples_that_move_end_once() -> None:
    _, real, simulated = step_of("cost, moves at 0.9 of an actor")
    assert real.ends.keys() == simulated.ends.keys()
    assert real.moved > 0 and simulated.moved > 0


def test_whole_steps_are_those_of_a_rehearsed_job() -> None:
    """What real processes took is in the file."""
    recorded = json.loads((BENCHMARKS / "simulator" / "results" / "rehearsal.json").read_text())
    found = simulated(Setting(**recorded["setting"]))
    for name in ("seconds", "gpu_seconds"):
        measured, forecast = (sum(step[name] for step in steps[1:]) for steps in (recorded["steps"], found))
        assert forecast == pytest.approx(measured, rel=0.05)
