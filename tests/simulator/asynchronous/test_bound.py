"""What no system goes below, by any of them, and each of its parts where it binds."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.simulator.asynchronous.bound import (
    decode_instance_seconds,
    least_seconds,
    stale_seconds,
    whole_cluster_seconds,
)
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split, Streaming, System
from rlhfless_operator.simulator.asynchronous.work import Group
from rlhfless_operator.simulator.scenarios import Scenario
from tests.simulator.asynchronous.small_runs import ROLLOUTS, SCENARIOS, STREAMING, run, split_of
from tests.simulator.small_scenario import SMALL

SPLITS = st.tuples(st.integers(1, 6), st.sampled_from((4, 16, 256)), st.integers(0, 3))


@pytest.mark.slow
@given(SCENARIOS, st.one_of(STREAMING, ROLLOUTS), SPLITS, st.integers(0, 50))
@settings(max_examples=150, deadline=None)
def test_no_system_beats_the_bounds(scenario: Scenario, system: System, split: tuple[int, int, int], seed: int) -> None:
    gpus = split_of(scenario, *split)
    if isinstance(system, Streaming):
        gpus = dataclasses.replace(gpus, preparers=0)
    outcome = run(scenario, system, gpus, seed)
    steps, most = [step.groups for step in outcome.steps], max(outcome.staleness)
    for regroups in (False, True):
        beside = isinstance(system, Rollouts)
        bound = least_seconds(scenario, gpus, steps, most, regroups=regroups, publishes_beside=beside)
        anyone = whole_cluster_seconds(scenario, steps, most, regroups=regroups)
        assert anyone <= bound * (1 + 1e-9)
        assert bound <= outcome.seconds * (1 + 1e-6)


def groups(*lengths: int) -> list[Group]:
    return [Group(number, number, 100, (length,)) for number, length in enumerate(lengths)]


def test_regrouping_puts_long_responses_together() -> None:
    scenario = dataclasses.replace(SMALL, update_seconds=0.0, training_utilisation=1e9, preparation_utilisation=1e9)
    split = Split(1, 1, 256)
    long, short = groups(600)[0], groups(10)[0]
    mixed, sorted_steps = [[long, short], [short, long]], [[long, long], [short, short]]
    kept = stale_seconds(scenario, split, mixed, 0)
    assert stale_seconds(scenario, split, mixed, 0, regroups=True) == pytest.approx(
        stale_seconds(scenario, split, sorted_steps, 0)
    )
    assert stale_seconds(scenario, split, sorted_steps, 0) < 0.6 * kept


def test_staleness_lets_so_many_steps_share_the_longest_response() -> None:
    steps = [groups(600, 10)] * 12
    found = [stale_seconds(SMALL, Split(1, 1, 256), steps, most) for most in (0, 1, 2, 3)]
    assert found == pytest.approx([found[0], found[0] / 2, found[0] / 3, found[0] / 4])


def test_each_part_of_the_split_bounds_what_it_does() -> None:
    steps = [groups(100, 200, 300)] * 3
    every = [group for step in steps for group in step]
    slow = dataclasses.replace(SMALL, training_utilisation=1e-4)
    tokens = sum(group.tokens for group in every)
    learning = slow.learning_gpu_seconds(tokens) + slow.preparation_gpu_seconds(tokens)
    assert least_seconds(slow, Split(3, 2, 256), steps, 5) == pytest.approx(learning / 2 + 3 * slow.update_seconds)
    quick = dataclasses.replace(SMALL, training_utilisation=1e9, preparation_utilisation=1e9, update_seconds=0.0)
    # A sequence at a time: the instance is what is waited for.
    decoding = decode_instance_seconds(quick, every, 1)
    assert least_seconds(quick, Split(1, 1, 1), steps, 9) == pytest.approx(decoding)
    lone = dataclasses.replace(quick, preparation_utilisation=1e-4)
    preparing = lone.preparation_gpu_seconds(tokens)
    assert least_seconds(lone, Split(3, 4, 256, preparers=1), steps, 5) == pytest.approx(preparing)
    assert least_seconds(lone, Split(3, 4, 256, preparers=3), steps, 5) == pytest.approx(preparing / 3)


def test_full_batches_are_what_decoding_needs_least() -> None:
    every = groups(*[100] * 64)
    found = [decode_instance_seconds(SMALL, every, sequences) for sequences in (1, 8, 64)]
    assert found[0] > 3 * found[1] > 3 * found[2]
