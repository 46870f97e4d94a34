"""Scenarios that are simulated within milliseconds, and runs of any system over them."""

import dataclasses

from hypothesis import strategies as st

from rlhfless_operator.simulator.asynchronous.compare import run_system
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split, Streaming, System
from rlhfless_operator.simulator.asynchronous.work import Outcome
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.traces import LengthStatistics
from tests.simulator.small_scenario import SMALL

SCENARIOS = st.builds(
    lambda prompts, samples, gpus, median, runaways, utilisation, load: dataclasses.replace(
        SMALL,
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        gpus=gpus,
        lengths=LengthStatistics(median=median, longest=600, runaways=runaways),
        training_utilisation=utilisation,
        weight_load_seconds=load,
    ),
    prompts=st.integers(1, 9),
    samples=st.integers(1, 4),
    gpus=st.integers(3, 9),
    median=st.sampled_from((20, 100, 300)),
    runaways=st.sampled_from((0.0, 0.05)),
    utilisation=st.sampled_from((0.002, 0.02, 0.35)),
    load=st.sampled_from((0.0, 0.5, 3.0)),
)
STREAMING = st.builds(
    Streaming,
    name=st.just("any"),
    stands_for=st.just("any"),
    new_weights=st.sampled_from(("switch", "drain", "finish")),
    ahead=st.sampled_from((0, 0.25, 0.5, 1, 2, 4, None)),
    pieces=st.integers(1, 4),
    whole_batches=st.booleans(),
    oldest_first=st.booleans(),
    repack_seconds=st.sampled_from((None, 0.3, 5.0)),
)
ROLLOUTS = st.builds(
    Rollouts,
    name=st.just("any"),
    stands_for=st.just("any"),
    max_staleness=st.integers(1, 3),
    too_stale=st.sampled_from(("wait", "drop", "downweight")),
    new_weights=st.sampled_from(("finish", "switch")),
    recomputes=st.booleans(),
)


def split_of(scenario: Scenario, instances: int, sequences: int, preparers: int = 0) -> Split:
    """As many instances as there is room for beside a preparer and a learner of one GPU at least."""
    count = min(instances, scenario.gpus - 2)
    own = min(preparers, scenario.gpus - 1 - count)
    return Split(count, scenario.gpus - own - count, sequences, own)


def run(scenario: Scenario, system: System, split: Split, seed: int, steps: int = 4) -> Outcome:
    """So many steps."""
    return run_system(scenario, system, split, scenario.draw_trace(seed), seed, steps)
