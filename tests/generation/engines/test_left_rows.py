"""Rows that sequences have left, and what is computed when they come back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.generation.engines.admission import LeftRows
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.kept_rows import HeldRow
from rlhfless_functions.generation.engines.passes import REPLAY_ROWS, ModelPasses
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from tests.generation.engines.conformance.test_turns import ANSWER, LONGEST, in_one_run, turn_by_turn
from tests.generation.engines.shares import assert_same, save_model, settings_of, share, version

torch.set_num_threads(1)

TASK = SequenceTask(3, 1, [1, 2], seed=11, response_tokens=[5], log_probs=[-1.0])
Passes = list[list[tuple[int, int, int]]]


@pytest.fixture
def computed_again(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """The (slot, position, token) of each pass over tokens that are not sampled."""
    passes: Passes = []
    replay = ModelPasses._replay

    def noted(self: ModelPasses, rows: list[tuple[int, int, int]]) -> None:
        passes.append(rows)
        replay(self, rows)

    monkeypatch.setattr(ModelPasses, "_replay", noted)
    return passes


@pytest.fixture
def make_engine(tmp_path: Path, tiny_model: Path) -> Callable[[], TransformersEngine]:
    folder = save_model(tmp_path / "model", tiny_model)

    def make() -> TransformersEngine:
        engine = TransformersEngine()
        engine.load(settings_of(folder), version(folder))
        return engine

    return make


@pytest.mark.parametrize("delay", [1, 6, 60])
def test_only_what_is_new_is_computed_of_a_sequence_that_comes_back(
    make_engine: Callable[[], TransformersEngine], computed_again: Passes, delay: int
) -> None:
    tasks = share(8, 3)
    finished = in_one_run(make_engine(), tasks, delay)
    rows = [row for rows in computed_again for row in rows]
    # The last token that was sampled and all that was given but the last; the last one goes through a decode pass.
    given = sum(response.log_probs.count(0.0) for response in finished.values()) // ANSWER
    assert len(rows) == given * ANSWER > 0
    assert_same(finished, turn_by_turn(make_engine(), tasks))


def test_sequences_that_come_back_together_are_computed_in_one_pass(
    make_engine: Callable[[], TransformersEngine], computed_again: Passes
) -> None:
    tasks = share(8, 3)
    back = [replace(task, response_tokens=[5 + task.index] * 9, log_probs=[0.0] * 9) for task in tasks]
    run = make_engine().start(back, LONGEST, None)
    run.step()
    assert len({slot for slot, *_ in computed_again[0]}) == len(tasks)
    assert len(computed_again) == -(-len(tasks) * 9 // REPLAY_ROWS)


def test_a_row_that_another_sequence_needs_is_computed_again(
    make_engine: Callable[[], TransformersEngine], computed_again: Passes
) -> None:
    tasks = share(8, 3)
    few = in_one_run(make_engine(), tasks, 6, budget=200)
    assert sum(map(len, computed_again)) > sum(each.log_probs.count(0.0) for each in few.values())


@given(slots=st.lists(st.integers(0, 20), unique=True), taken=st.sets(st.integers(0, 20)))
def test_the_row_that_was_left_first_is_needed_first(slots: list[int], taken: set[int]) -> None:
    rows = LeftRows()
    for number, slot in enumerate(slots):
        rows.leave(HeldRow(slot, replace(TASK, index=number), [5, 6]))
    rows.take(taken)
    assert rows.slots == [slot for slot in slots if slot not in taken]
    moves = {slot: slot + 100 for slot in slots[::2]}
    assert rows.swap(moves) == {slot: moves[slot] for slot in slots[::2] if slot not in taken}
    assert rows.slots == [slot + 100 * (place % 2 == 0) for place, slot in enumerate(slots) if slot not in taken]


@pytest.mark.parametrize(
    ("tokens", "seed", "finds"),
    [([5, 6, 7], 11, True), ([5, 6], 11, True), ([5], 11, False), ([5, 9, 7], 11, False), ([5, 6, 7], 12, False)],
    ids=["goes on", "as it was", "its beginning", "another one", "another sample"],
)
def test_a_row_is_found_by_the_sequence_that_continues_it(tokens: list[int], seed: int, finds: bool) -> None:
    rows = LeftRows()
    rows.leave(HeldRow(4, TASK, [5, 6]))
    found = rows.find(replace(TASK, response_tokens=tokens, seed=seed))
    assert (found is not None) == finds
    assert rows.find(replace(TASK, index=2)) is None
