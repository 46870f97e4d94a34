"""The lower bounds: below everything that anyone can do, by brute force, and reached where they can be."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.step.bounds import least_held, lower_bound, most_at_once
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, Planner


def bound(lengths, latency, seconds, **options):
    lengths = np.array(lengths, dtype=float)
    options = {"prefill_tokens": 0.0} | options
    return lower_bound(lengths, np.full(len(lengths), 10.0), latency, seconds, **options)


def least_steps(lengths, work, step, seconds):
    """The least number of decode steps, by trying all: which samples are in each step is free, and so is their order.

    A sample is done in time if the steps that it is in take no longer than `seconds` together.
    """
    subsets = [
        chosen for size in range(1, len(lengths) + 1) for chosen in itertools.combinations(range(len(lengths)), size)
    ]
    best = math.inf

    def search(first, left, spent, steps):
        nonlocal best
        if steps >= best:
            return
        if not any(left):
            best = steps
            return
        for number in range(first, len(subsets)):
            chosen = subsets[number]
            if all(left[i] for i in chosen):
                took = step + work * len(chosen)
                if all(spent[i] + took <= seconds + 1e-9 for i in chosen):
                    search(
                        number,
                        [count - (i in chosen) for i, count in enumerate(left)],
                        [time + took * (i in chosen) for i, time in enumerate(spent)],
                        steps + 1,
                    )

    search(0, list(lengths), [0.0] * len(lengths), 0)
    return best


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from([0.1, 0.5, 2.0]),
    st.floats(1.0, 3.0),
)
@settings(max_examples=60, deadline=None)
def test_no_choice_of_steps_needs_fewer_than_the_bound(lengths, work, slack):
    step = 1.0
    seconds = (step + work) * max(lengths) * slack
    steps = least_steps(lengths, work, step, seconds)
    busy = step * steps + work * sum(lengths)
    assert bound(lengths, LinearLatency(step, work), seconds) <= busy * (1 + 1e-9)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=12), st.floats(1.0001, 5), st.floats(0, 30))
@settings(max_examples=80, deadline=None)
def test_no_plan_costs_less_than_the_bound(lengths, ratio, start):
    latency = LinearLatency(0.01, 2e-4, 1e-7, 1e-4)
    samples = [SampleLoad(prompt, 0, 10, length) for prompt, length in enumerate(lengths)]
    planner = Planner(samples, latency, Limits(max_instances=12), start)
    plan = planner.within_deadline(start + (planner.least_seconds - start) * ratio)
    found = bound(lengths, latency, plan.expected_seconds, start_seconds=start, prefill_tokens=10.0 * len(lengths))
    assert found == pytest.approx(plan.lower_bound_instance_seconds)
    assert found <= plan.expected_instance_seconds * (1 + 1e-9)


def test_it_is_reached_by_equal_lengths():
    latency = LinearLatency(0.01, 1e-4)
    samples = [SampleLoad(prompt, 0, 10, 1000) for prompt in range(400)]
    plan = Planner(samples, latency, Limits(max_instances=4)).weighted(0.0)
    assert len(plan.shares) == 4
    assert plan.lower_bound_instance_seconds == pytest.approx(plan.expected_instance_seconds, rel=1e-6)


def test_it_is_nearly_reached_by_many_sorted_shares():
    latency = LinearLatency(0.01, 1e-4)
    lengths = np.linspace(200, 1000, 40_000)
    samples = [SampleLoad(prompt, 0, 10, float(length)) for prompt, length in enumerate(lengths)]
    plan = Planner(samples, latency, Limits(max_instances=512)).within_deadline(20.0)
    assert plan.lower_bound_instance_seconds > 0.97 * plan.expected_instance_seconds


def test_more_time_never_costs_more():
    latency = LinearLatency(0.01, 1e-4, 1e-7, 1e-4)
    costs = [bound([500, 900, 100], latency, seconds, start_seconds=2.0) for seconds in np.linspace(11.5, 40, 30)]
    assert costs == sorted(costs, reverse=True)


def test_what_nobody_can_do_costs_infinitely_much():
    assert bound([1000], LinearLatency(0.01), 9.0) == math.inf
    assert bound([1000], LinearLatency(0.01), 5.0, start_seconds=5.0) == math.inf


def test_a_full_batch_bounds_the_steps():
    latency = LinearLatency(0.01, 1e-6)
    assert bound([100] * 64, latency, 1000.0, max_batch=16) == pytest.approx(0.01 * 400 + 1e-6 * 6400)


def test_every_instance_that_is_needed_is_started():
    latency = LinearLatency(0.01)
    assert bound([1000] * 3, latency, 10.5, start_seconds=0.5, max_batch=1) == pytest.approx(3 * 10.5)


# --- keeping and letting go ---

uses = st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda use: (float(use[0]), float(use[0] + use[1])))


def cheapest(uses, start, drain):
    """By trying all: each use takes an instance that was kept since an earlier one, or a fresh one."""
    best = math.inf

    def choose(number, kept, cost):
        nonlocal best
        if number == len(uses):
            # Every instance that has no further work is let go.
            best = min(best, cost + drain * (len(uses) - len(kept)))
            return
        begin, end = uses[number]
        choose(number + 1, kept, cost + start + end - begin)
        for earlier, (_, freed) in enumerate(uses):
            if earlier not in kept and freed <= begin:
                choose(number + 1, kept | {earlier}, cost + (begin - freed) + end - begin)

    choose(0, frozenset(), 0.0)
    return best


@given(st.lists(uses, max_size=5), st.integers(0, 5), st.integers(0, 5))
def test_the_least_held_is_the_best_of_all_choices(uses, start, drain):
    held = least_held(uses, start_seconds=float(start), drain_seconds=float(drain))
    assert held == pytest.approx(cheapest(uses, start, drain))


def test_no_work_costs_nothing():
    assert least_held([], start_seconds=1.0, drain_seconds=1.0) == 0


def test_a_short_gap_is_idled_and_a_long_one_is_not():
    uses = [(0.0, 10.0), (12.0, 20.0), (100.0, 110.0)]
    # 28 of work, 2 idle, and two instances that start and go.
    assert least_held(uses, start_seconds=3.0, drain_seconds=4.0) == 28 + 2 + 2 * 7


def test_the_instance_that_was_freed_last_goes_on():
    # Two instances; one has worked till 10 and the other till 19. The next work comes at 20, and more at 40.
    uses = [(0.0, 10.0), (0.0, 19.0), (20.0, 30.0), (40.0, 50.0)]
    # At 20 the gap is 1, not 10; at 40 it is 10 of the same one. The other is never needed again.
    assert least_held(uses, start_seconds=6.0, drain_seconds=6.0) == 49 + 1 + 10 + 2 * 12


@given(st.lists(uses, max_size=5))
def test_each_instance_that_is_needed_at_once_starts_once(uses):
    """So a long start costs one start for each of them, and no more."""
    gaps = least_held(uses, start_seconds=1e6, drain_seconds=0.0) - 1e6 * most_at_once(uses)
    assert 0 <= gaps - sum(end - begin for begin, end in uses) < 1e3
    assert most_at_once(uses) == max((sum(begin <= at < end for begin, end in uses) for at, _ in uses), default=0)
