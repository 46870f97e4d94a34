"""Ours, simulated: beside the queue that jobs use, and what the live loop promises of staleness and of steps."""

import asyncio
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from overlapped_rollouts import EmulatedClock, Job

from rlhfless_operator.simulator.asynchronous.rollouts import run_rollouts
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS, Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import Group, StepShares, draw_steps
from rlhfless_operator.simulator.instance import Instance, Response
from rlhfless_operator.simulator.scenarios import Scenario
from tests.simulator.asynchronous.small_runs import ROLLOUTS, SCENARIOS, run, split_of
from tests.simulator.small_scenario import SMALL

SPLITS = st.tuples(st.integers(1, 6), st.sampled_from((4, 16, 256)), st.integers(0, 3))
SEEDS = st.integers(0, 50)


@given(SCENARIOS, ROLLOUTS, SPLITS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_each_step_learns_from_its_own_groups_with_one_version_of_the_weights(
    scenario: Scenario, system: Rollouts, split: tuple[int, int, int], seed: int
) -> None:
    outcome = run(scenario, system, split_of(scenario, *split), seed)
    drawn = list(itertools.islice(draw_steps(scenario, scenario.draw_trace(seed), seed), 4))
    assert [list(step.groups) for step in outcome.steps] == drawn
    assert all(len(set(step.versions)) == 1 for step in outcome.steps)
    assert min(outcome.staleness) >= 0
    assert max(outcome.staleness) <= system.max_staleness
    assert all(first.end < second.end for first, second in zip(outcome.steps, outcome.steps[1:], strict=False))


@given(SCENARIOS, ROLLOUTS, SPLITS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_work_is_conserved_and_no_gpu_is_held_twice(
    scenario: Scenario, system: Rollouts, split: tuple[int, int, int], seed: int
) -> None:
    gpus = split_of(scenario, *split)
    outcome = run(scenario, system, gpus, seed)
    tokens = sum(group.tokens for step in outcome.steps for group in step.groups)
    learning = scenario.learning_gpu_seconds(tokens)
    preparation = scenario.preparation_gpu_seconds(tokens)
    updates = len(outcome.steps) * scenario.update_seconds * gpus.learner_gpus
    assert outcome.learner_busy == pytest.approx(learning + updates + (0 if gpus.preparers else preparation))
    assert outcome.learner_busy <= outcome.learner_held * (1 + 1e-9)
    assert outcome.preparer_held >= (preparation if gpus.preparers else 0)
    assert 0 < outcome.generation_busy <= outcome.generation_held * (1 + 1e-9)
    # Starts are charged, and delay nothing: what is held at most is the split for the whole run, and starts.
    starts = scenario.startup_seconds * gpus.instances
    assert outcome.generation_held <= gpus.instances * outcome.seconds + starts + 1e-6


class OneEach:
    """An actor for each response, the longest first."""

    def plan(self, groups: Sequence[Group]) -> StepShares:
        responses = [response for group in groups for response in group.responses()]
        return StepShares([[response] for response in sorted(responses, key=lambda each: -each.length)])

    def observe(self, groups: Sequence[Group]) -> None:
        pass


def alone(scenario: Scenario, response: Response) -> float:
    instance = Instance("a", scenario.profile().latency, 0.0, max_batch=1, kv_tokens=10**9)
    instance.add([response])
    return instance.next_end()


LENGTHS = st.lists(st.lists(st.integers(1, 600), min_size=3, max_size=3), min_size=2, max_size=6)


@given(LENGTHS, st.integers(1, 3), st.floats(0.01, 20))
@settings(max_examples=60, deadline=None)
def test_steps_end_when_those_of_the_queue_that_jobs_use_do(
    lengths: list[list[int]], most: int, learning: float
) -> None:
    """Three actors with one response each, whose weights are there at once."""
    # The queue is told how many steps go ahead; it is as many as staleness allows where learning is quick.
    learning = learning if most == 1 else 0.01
    scenario = dataclasses.replace(
        SMALL, prompts_per_step=3, samples_per_prompt=1, weight_load_seconds=0.0, update_seconds=learning,
        training_utilisation=1e12, preparation_utilisation=1e12,
    )  # fmt: skip
    numbers = itertools.count()
    batches = [[Group(next(numbers), 0, 1, (length,)) for length in step] for step in lengths]
    batches += batches[:1] * 4
    plans = OneEach()
    shares = [[alone(scenario, *share) for share in plans.plan(step).shares] for step in batches[: len(lengths)]]
    job = Job(shares, learning, most, overlaps=True)
    with asyncio.Runner(loop_factory=EmulatedClock) as runner:
        runner.run(job.run())
        seconds = runner.get_loop().time()
    system = Rollouts("any", "any", most)
    outcome = run_rollouts(scenario, system, Split(3, 1, 256), iter(batches), len(lengths), plans=plans)
    assert outcome.seconds == pytest.approx(seconds, rel=1e-6)
    assert outcome.staleness[::3] == job.stale[: len(lengths)]


def test_steps_of_a_synchronous_length_wait_for_the_one_preparer() -> None:
    slow = dataclasses.replace(SMALL, preparation_utilisation=1e-3)
    split = Split(2, 1, 256, preparers=1)
    own = run(slow, SYSTEMS["rlhfless-async-2"], split, seed=0, steps=6)
    tokens = sum(group.tokens for step in own.steps for group in step.groups)
    assert own.seconds >= slow.preparation_gpu_seconds(tokens)
    assert own.preparer_held == pytest.approx(slow.preparation_gpu_seconds(tokens), rel=0.2)


def test_a_run_is_the_same_again() -> None:
    found = [run(SMALL, SYSTEMS["rlhfless-async-1"], Split(2, 1, 256), seed=0) for _ in range(2)]
    assert found[0] == found[1]
