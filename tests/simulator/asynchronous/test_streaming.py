"""Systems whose groups stream: nothing is lost, what admission promises, and cases that can be counted by hand."""

import dataclasses
import math
from itertools import islice
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.simulator.asynchronous.streaming import run_streaming
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS, Split, Streaming
from rlhfless_operator.simulator.asynchronous.work import Group, draw_steps
from rlhfless_operator.simulator.scenarios import Scenario
from tests.simulator.asynchronous.small_runs import SCENARIOS, STREAMING, run, split_of
from tests.simulator.small_scenario import SMALL

SPLITS = st.tuples(st.integers(1, 6), st.sampled_from((4, 16, 256)))
SEEDS = st.integers(0, 50)
STREAMING_NAMES = [name for name, system in SYSTEMS.items() if isinstance(system, Streaming)]


@given(SCENARIOS, STREAMING, SPLITS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_every_step_learns_from_a_whole_batch_of_groups_and_none_is_learnt_from_twice(
    scenario: Scenario, system: Streaming, split: tuple[int, int], seed: int
) -> None:
    outcome = run(scenario, system, split_of(scenario, *split), seed)
    assert [len(step.groups) for step in outcome.steps] == [scenario.prompts_per_step] * 4
    numbers = [group.number for step in outcome.steps for group in step.groups]
    assert len(set(numbers)) == len(numbers)
    # Long responses may hold up many batches that are drawn before the last step's groups.
    batches = islice(
        draw_steps(scenario, scenario.draw_trace(seed), seed), max(numbers) // scenario.prompts_per_step + 1
    )
    drawn = {group.number: group for batch in batches for group in batch}
    assert all(drawn[group.number] == group for step in outcome.steps for group in step.groups)
    assert all(first.end < second.end for first, second in zip(outcome.steps, outcome.steps[1:], strict=False))


@given(SCENARIOS, STREAMING, SPLITS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_admission_bounds_the_mean_staleness_and_no_version_is_of_the_future(
    scenario: Scenario, system: Streaming, split: tuple[int, int], seed: int
) -> None:
    outcome = run(scenario, system, split_of(scenario, *split), seed)
    assert min(outcome.staleness) >= 0
    # An instance that loads when it is empty may begin groups with weights that are not the newest.
    if system.ahead is not None and system.new_weights != "finish":
        assert fmean(outcome.staleness) <= math.ceil(system.ahead)


@given(SCENARIOS, STREAMING, SPLITS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_work_is_conserved_and_nobody_works_more_than_all_the_time(
    scenario: Scenario, system: Streaming, split: tuple[int, int], seed: int
) -> None:
    gpus = split_of(scenario, *split)
    outcome = run(scenario, system, gpus, seed)
    tokens = sum(group.tokens for step in outcome.steps for group in step.groups)
    work = scenario.preparation_gpu_seconds(tokens) + scenario.learning_gpu_seconds(tokens)
    updates = len(outcome.steps) * scenario.update_seconds * gpus.learner_gpus
    # Pieces of a step that is not over may have been learnt from as well.
    assert outcome.learner_busy >= (work + updates) * (1 - 1e-9)
    assert outcome.learner_busy == pytest.approx(work + updates)
    assert outcome.learner_busy <= outcome.learner_held * (1 + 1e-9)
    assert 0 < outcome.generation_busy <= outcome.generation_held * (1 + 1e-9)
    assert outcome.gpu_seconds == pytest.approx((gpus.instances + gpus.learner_gpus) * outcome.seconds)


@given(SCENARIOS, SPLITS, SEEDS)
@settings(max_examples=30, deadline=None)
def test_one_step_off_is_one_step_off(scenario: Scenario, split: tuple[int, int], seed: int) -> None:
    outcome = run(scenario, SYSTEMS["one-step-off"], split_of(scenario, *split), seed)
    count = scenario.prompts_per_step
    assert outcome.staleness == [0] * count + [1] * 3 * count
    # Whole batches, in their order.
    assert [sorted(group.number for group in step.groups) for step in outcome.steps] == [
        list(range(number * count, (number + 1) * count)) for number in range(4)
    ]


def even(lengths: list[int]) -> list[Group]:
    return [Group(number, number, 100, (length,)) for number, length in enumerate(lengths)]


def one_sequence(**changes: object) -> Scenario:
    """One response a step, whose learning takes next to no time."""
    return dataclasses.replace(
        SMALL, prompts_per_step=1, samples_per_prompt=1, gpus=2, weight_load_seconds=3.0, update_seconds=0.5, **changes
    )


def streaming(name: str, scenario: Scenario, lengths: list[int], instances: int = 1, steps: int = 2):
    batches = ([group] for group in even(lengths))
    return run_streaming(scenario, SYSTEMS[name], Split(instances, 1, 256), batches, steps)


def test_running_responses_wait_for_new_weights_and_their_contexts_are_computed_again() -> None:
    scenario = one_sequence()
    latency = scenario.profile().latency
    # The second response is begun beside the first one, and is still under way when the weights come.
    outcome = streaming("areal-1", scenario, [100, 400, 400, 400, 400, 400], instances=2)
    alone = latency.prefill_token_seconds * 100 + 400 * latency.decode_seconds(1, 300)
    learning = scenario.learning_gpu_seconds(500) + scenario.preparation_gpu_seconds(500)
    interrupted = 3.0 + alone + 3.0
    assert outcome.steps[1].groups[0].number == 1
    recomputed = outcome.steps[1].end - learning - 0.5 - interrupted
    made = 100 * latency.decode_seconds(1, 150) + scenario.learning_gpu_seconds(200) + 0.5
    assert recomputed == pytest.approx(
        latency.prefill_token_seconds * (100 + made / latency.decode_seconds(1, 200)), rel=0.1
    )
    assert outcome.steps[1].versions == (0,)


def test_without_partial_rollouts_everybody_waits_for_the_last_response() -> None:
    scenario = dataclasses.replace(one_sequence(), prompts_per_step=2)
    latency = scenario.profile().latency
    # Half a batch may be begun ahead: the long response is, beside the first batch.
    batches = [even([10, 10, 600, 10, 10, 10, 10, 10, 10, 10])] * 2
    found = {
        name: run_streaming(scenario, SYSTEMS[name], Split(3, 1, 256), iter(batches), 2)
        for name in ("verl-async", "verl-async-no-partial")
    }
    partial, whole = found["verl-async"], found["verl-async-no-partial"]
    assert whole.steps[0].end == partial.steps[0].end
    assert 2 not in [group.number for step in partial.steps for group in step.groups]
    # Two loads, and the long response between them.
    assert partial.seconds < 3.0 + 600 * latency.decode_seconds(1, 100) + 3.0 < whole.seconds
    assert whole.steps[1].groups[0].number == 2


def test_responses_that_keep_their_weights_are_never_interrupted() -> None:
    scenario = one_sequence()
    latency = scenario.profile().latency
    outcome = streaming("laminar", scenario, [400] * 8, instances=1, steps=2)
    alone = latency.prefill_token_seconds * 100 + 400 * latency.decode_seconds(1, 300)
    learning = scenario.learning_gpu_seconds(500) + scenario.preparation_gpu_seconds(500) + 0.5
    # The instance loads the weights that it begins with. The first update comes after its second response has begun.
    assert outcome.steps[0].end == pytest.approx(3.0 + alone + learning)
    assert outcome.steps[1].end == pytest.approx(3.0 + 2 * alone + learning)
    assert outcome.steps[1].versions == (0,)


@pytest.mark.parametrize("name", STREAMING_NAMES)
def test_a_system_does_the_same_again(name: str) -> None:
    found = [run(SMALL, SYSTEMS[name], Split(2, 2, 256), seed=0) for _ in range(2)]
    assert found[0] == found[1]
