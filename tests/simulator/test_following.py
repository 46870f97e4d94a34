"""Learning from groups while others are generated, in simulation."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.step.pace import LearnerPace
from rlhfless_operator.simulator.following import Piece, follow_apart, follow_on_slots, prepare_in_chunks
from rlhfless_operator.simulator.policies import find_policy
from rlhfless_operator.simulator.steps import run_policy
from tests.simulator.small_scenario import SMALL

SLOTS = dataclasses.replace(SMALL, gpus=16, startup_seconds=2.0, trainer_start_seconds=3.0, store_rate=1e9)
WAKE = LearnerPace(3.0, 3.0)
seconds = st.floats(0.0, 100.0)


@given(groups=st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=40), instances=st.integers(1, 4))
def test_each_group_is_prepared_once_after_it_is_complete(
    groups: list[tuple[float, float, float]], instances: int
) -> None:
    completions, preparation, learning = (np.array(column) for column in zip(*groups, strict=True))
    found = prepare_in_chunks(completions, preparation, learning, instances, begin=5.0, wake_seconds=2.0)
    assert sorted(group for piece in found.pieces for group in piece.groups) == list(range(len(groups)))
    for piece in found.pieces:
        assert piece.ready >= max(completions[list(piece.groups)]) + preparation[list(piece.groups)].sum() - 1e-6
        assert piece.seconds == pytest.approx(learning[list(piece.groups)].sum())
    assert found.held_seconds >= preparation.sum() - 1e-6


def test_chunks_become_smaller_towards_the_end() -> None:
    ones = np.ones(60)
    found = prepare_in_chunks(np.arange(60.0), ones, ones, 1, begin=0.0, wake_seconds=2.0)
    sizes = [len(piece.groups) for piece in found.pieces]
    assert sizes[0] == 10 and sizes[-1] == 1 and sizes == sorted(sizes, reverse=True)


def test_an_instance_that_waits_for_longer_than_a_wake_sleeps() -> None:
    completions, ones = np.array([0.0, 11.5, 100.0]), np.ones(3)
    found = prepare_in_chunks(completions, ones, ones, 1, begin=10.0, wake_seconds=2.0)
    assert [piece.ready for piece in found.pieces] == [13.0, 14.0, 103.0]
    assert found.held_seconds == 3.0 + 1.0 + 3.0


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Piece], np.ndarray, np.ndarray]:
    rows = draw(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=12))
    pieces = [Piece(ready, work, [group]) for group, (ready, work, _) in enumerate(rows)]
    expected, learning = np.array([each for *_, each in rows]), np.array([work for _, work, _ in rows])
    return sorted(pieces, key=lambda piece: piece.ready), expected, learning


@given(batch=batches(), gpus=st.integers(1, 4), free=st.floats(0.0, 200.0), known=st.booleans())
def test_on_slots_a_learner_that_follows_ends_no_later_than_one_that_waits_for_the_batch(
    batch: tuple[list[Piece], np.ndarray, np.ndarray], gpus: int, free: float, known: bool
) -> None:
    pieces, expected, learning = batch
    run = follow_on_slots(pieces, expected if known else None, learning, WAKE, gpus, free)
    complete, total = pieces[-1].ready, float(learning.sum())
    assert run.end <= max(complete, free) + WAKE.start_seconds + total + 1e-6
    assert run.end >= max(piece.ready + piece.seconds for piece in pieces) - 1e-6
    assert run.gpu_seconds >= gpus * (total + WAKE.start_seconds) - 1e-6


def test_on_slots_a_learner_is_charged_while_it_idles_between_its_tasks_and_wakes_once() -> None:
    pieces = [Piece(10.0, 20.0, [0]), Piece(100.0, 20.0, [1])]
    run = follow_on_slots(pieces, np.array([10.0, 100.0]), np.array([20.0, 20.0]), WAKE, 2, 0.0)
    assert (run.asked, run.end) == ((10.0, 10.0), 120.0)
    assert run.gpu_seconds == 2 * (120.0 - 10.0)


def test_on_slots_a_learner_that_knows_nothing_begins_with_half_of_the_groups() -> None:
    pieces = [Piece(10.0 * number, 2.0, [number]) for number in range(1, 5)]
    run = follow_on_slots(pieces, None, np.full(4, 2.0), WAKE, 1, 0.0)
    assert (run.asked, run.end) == ((20.0,), 42.0)


def test_a_learner_with_gpus_of_its_own_may_wait_on_them() -> None:
    pieces = [Piece(10.0, 2.0, [0]), Piece(20.0, 2.0, [1])]
    stays = follow_apart(pieces, np.array([10.0, 20.0]), np.full(2, 2.0), WAKE, 2, None, 1.0)
    assert (stays.end, stays.gpu_seconds) == (23.0, 46.0)
    comes = follow_apart(pieces, np.array([10.0, 20.0]), np.full(2, 2.0), WAKE, 2, np.full(2, -np.inf), 1.0)
    assert comes.end == pytest.approx(23.0, abs=0.5)
    assert comes.gpu_seconds < stays.gpu_seconds


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_step_whose_learner_follows_is_shorter(sleeps: bool) -> None:
    scenario = dataclasses.replace(SLOTS, sleeps=sleeps)
    trace = scenario.draw_trace(0)
    whole, follows = (
        sum(step.seconds for step in run_policy(scenario, find_policy(name), trace, 0))
        for name in ("rlhfless-whole-batch", "rlhfless")
    )
    assert follows < whole
