"""The trainer under the tail: a fluid queue of groups, and when GPUs join it."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.step.overlap import TrainerPlan, free_gpus, plan_trainer, queue, run_trainer


def by_small_steps(arrivals, work, joined, tick=0.01):
    """When all is done, walking through time."""
    now, left, arrived = 0.0, list(work), list(arrivals)
    while any(left):
        capacity = tick * sum(now >= moment for moment in joined)
        for group in np.argsort(arrived, kind="stable"):
            if arrived[group] <= now and left[group] > 0:
                done = min(left[group], capacity)
                left[group] -= done
                capacity -= done
        left = [0.0 if each < 1e-9 else each for each in left]
        now += tick
    return now


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 2)), min_size=1, max_size=5),
    st.lists(st.floats(0, 5), min_size=1, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_the_queue_ends_when_walking_through_time_says_so(groups, free):
    arrivals, work = (np.array(column) for column in zip(*groups, strict=True))
    free = np.sort(np.array(free))
    run = run_trainer(arrivals, work, free, TrainerPlan(len(free), 0.0), start_seconds=0, update_seconds=0)
    assert run.end == pytest.approx(by_small_steps(arrivals, work, free), abs=0.05)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 2)), min_size=1, max_size=12), st.integers(1, 4))
def test_several_servers_are_done_at_most_an_item_later_than_forecast(items, servers):
    arrivals, work = (np.array(column) for column in zip(*items, strict=True))
    free, ends = [0.0] * servers, np.zeros(len(items))
    for item in np.argsort(arrivals, kind="stable"):
        begin = max(heapq.heappop(free), arrivals[item])
        ends[item] = begin + work[item]
        heapq.heappush(free, ends[item])
    found = queue(arrivals, work, servers)
    assert found.max() <= ends.max() + 1e-9
    assert ends.max() <= found.max() + work.max() + 1e-9
    assert (found >= arrivals + work - 1e-9).all()


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 2)), min_size=1, max_size=8))
def test_one_server_takes_each_in_its_turn(items):
    arrivals, work = (np.array(column) for column in zip(*items, strict=True))
    free, ends = 0.0, np.zeros(len(items))
    for item in np.argsort(arrivals, kind="stable"):
        free = ends[item] = max(free, arrivals[item]) + work[item]
    assert queue(arrivals, work) == pytest.approx(ends)


def test_the_trainer_works_off_groups_as_they_arrive():
    arrivals, work = np.array([0.0, 10.0]), np.array([4.0, 4.0])
    free = free_gpus([0.0, 0.0], 2, 1)
    run = run_trainer(arrivals, work, free, TrainerPlan(2, 0.0), start_seconds=1, update_seconds=0.5)
    assert run.end == pytest.approx(10 + 2 + 0.5)
    assert run.gpu_seconds == pytest.approx(2 * 12.5)
    late = run_trainer(arrivals, work, free, TrainerPlan(2, 7.0), start_seconds=1, update_seconds=0.5)
    assert late.end == pytest.approx(12.5) and late.gpu_seconds == pytest.approx(11)


def test_gpus_join_the_trainer_as_actors_free_them():
    assert free_gpus([5.0, 3.0], 6, 2).tolist() == [-math.inf, -math.inf, 3, 3, 5, 5]
    run = run_trainer(
        np.zeros(1), np.array([8.0]), free_gpus([0.0, 4.0], 2, 1), TrainerPlan(2, 0.0), start_seconds=0,
        update_seconds=0,
    )  # fmt: skip
    assert run.end == pytest.approx(6) and run.gpus == 2


def test_the_trainer_that_is_planned_is_no_worse_than_waiting_for_the_end():
    random = np.random.default_rng(0)
    arrivals, work = np.sort(random.uniform(0, 20, 50)), random.uniform(1, 3, 50)
    free = free_gpus([5.0, 10.0, 15.0, 20.0], 8, 1)
    times = {"start_seconds": 1.0, "update_seconds": 0.5}
    plan = plan_trainer(arrivals, work, free, time_price=8, reserved=0, reserve_seconds=0, **times)
    found, waited = (run_trainer(arrivals, work, free, each, **times) for each in (plan, TrainerPlan(8, 19.0)))
    assert found.end * 8 + found.gpu_seconds <= waited.end * 8 + waited.gpu_seconds


@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(0.01, 5)), min_size=1, max_size=12),
    st.lists(st.floats(0, 30), max_size=6),
    st.integers(1, 4),
    st.floats(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_the_trainer_that_is_planned_is_the_best_of_all_that_are_tried(groups, ends, spare, price):
    arrivals, work = (np.array(column) for column in zip(*groups, strict=True))
    free = free_gpus(ends, len(ends) + spare, 1)
    times = {"start_seconds": 1.5, "update_seconds": 0.5}
    reserve = {"reserved": 2, "reserve_seconds": 2.0}
    plan = plan_trainer(arrivals, work, free, time_price=price, **reserve, **times)

    def value(each):
        run = run_trainer(arrivals, work, free, each, **times)
        return (run.end + (2.0 if run.gpus > len(free) - 2 else 0.0)) * price + run.gpu_seconds

    tried = [
        TrainerPlan(gpus, float(begin))
        for gpus in {1, len(free), plan.gpus}
        for begin in np.linspace(-1.5, arrivals.max(), 24)
    ]
    assert value(plan) == pytest.approx(min(map(value, [plan, *tried])), rel=1e-9)
