"""What is generated and learnt from: groups in the order of steps, and staleness as docs/asynchronous.md defines it."""

import itertools

import numpy as np

from rlhfless_operator.simulator.asynchronous.work import Group, Outcome, Step, draw_steps
from tests.simulator.small_scenario import SMALL


def test_steps_are_those_of_synchronous_runs_and_begin_anew_after_the_last() -> None:
    trace = SMALL.draw_trace(0)
    steps = list(itertools.islice(draw_steps(SMALL, trace, 3), 5))
    own = list(trace.steps(SMALL.prompts_per_step, np.random.default_rng(3)))
    assert [{group.prompt: list(group.lengths) for group in step} for step in steps[: len(own)]] == [
        step.lengths for step in own
    ]
    assert [group.number for step in steps for group in step] == list(range(5 * SMALL.prompts_per_step))


def test_a_group_has_its_prompt_once_for_each_sample() -> None:
    group = Group(7, 3, 10, (1, 2, 5))
    assert group.tokens == 3 * 10 + 8
    assert [(each.key, each.prompt_tokens, each.length) for each in group.responses()] == [
        ((7, 0), 10, 1), ((7, 1), 10, 2), ((7, 2), 10, 5)
    ]  # fmt: skip


def test_staleness_is_that_of_the_weights_that_began_a_group() -> None:
    group = Group(0, 0, 10, (1,))
    steps = (Step(1.0, (group, group), (0, 0)), Step(2.0, (group, group), (0, 1)), Step(4.0, (group,), (0,)))
    outcome = Outcome(steps, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert outcome.staleness == [0, 0, 1, 0, 2]
    assert (outcome.seconds, outcome.gpu_seconds) == (4.0, 11.0)
