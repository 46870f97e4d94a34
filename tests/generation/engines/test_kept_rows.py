"""Which rows of a cut run a new one takes over, and in which slots."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.continuous_batch import ContinuousBatch
from rlhfless_functions.generation.engines.kept_rows import HeldRow, keep_rows
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from tests.generation.engines.shares import SAMPLING, continued, finish, save_model, settings_of, share, version

torch.set_num_threads(1)

RESPONSE = [5, 6, 7]
TASK = SequenceTask(3, 1, [1, 2], seed=11, response_tokens=RESPONSE, log_probs=[-1.0] * 3)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"response_tokens": [5, 6]}, True),
        ({"response_tokens": []}, False),
        ({"response_tokens": [5, 9]}, False),
        ({"response_tokens": [5, 6, 7, 8]}, False),
        ({"prompt_tokens": [1, 3]}, False),
        ({"seed": 12}, False),
    ],
    ids=["all of it", "its beginning", "anew", "another one", "more than it", "another prompt", "another sample"],
)
def test_a_row_holds_a_response_or_its_beginning(changes: dict[str, list[int]], holds: bool) -> None:
    row = HeldRow(0, replace(TASK, response_tokens=[5]), RESPONSE)
    assert row.holds(replace(TASK, **changes)) == holds


@given(
    rows=st.permutations(range(24)).flatmap(lambda slots: st.integers(0, 24).map(lambda count: slots[:count])),
    numbers=st.lists(st.integers(0, 30), unique=True, min_size=1),
    slots=st.integers(1, 24),
)
def test_every_row_that_a_task_goes_on_with_gets_a_slot_of_its_own(
    rows: list[int], numbers: list[int], slots: int
) -> None:
    tasks = [replace(TASK, index=number, seed=number) for number in numbers]
    held = [HeldRow(slot, replace(TASK, index=number, seed=number), RESPONSE) for number, slot in enumerate(rows)]
    kept = keep_rows(held, tasks, slots)
    there = [task for task in tasks if task.seed < len(rows)]
    assert list(kept.tasks.values()) == there[:slots], "the first ones, in their order"
    assert set(kept.tasks) <= set(range(slots))
    source_of = {slot: source for source, slot in kept.moves.items()}
    for slot, task in kept.tasks.items():
        assert source_of.get(slot, slot) == rows[task.seed]
    assert not set(source_of) & {rows[task.seed] for task in kept.tasks.values()}, "no row is written over"
    assert all(task in kept for task in kept.tasks.values())
    assert all((task in kept) == (task in there[:slots]) for task in tasks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("engine-model"), tiny_model)


@pytest.fixture
def engine(folder: Path) -> TransformersEngine:
    made = TransformersEngine()
    made.load(settings_of(folder), version(folder))
    return made


def cut(engine: TransformersEngine, steps: int) -> tuple[ContinuousBatch, list[SequenceTask]]:
    tasks = share(8, 3)
    run = engine.start(tasks, SAMPLING, None, keep_kv_cache=True)
    done = {(result.prompt, result.index) for _ in range(steps) for result in run.step()}
    return run, continued([task for task in tasks if (task.prompt, task.index) not in done], run.unfinished())


@pytest.mark.parametrize("steps", [3, 12, 20])
def test_with_the_same_weights_a_kept_row_goes_on_as_if_nothing_had_been_cut(
    engine: TransformersEngine, steps: int
) -> None:
    whole = {(each.prompt, each.index): each for each in finish(engine.start(share(8, 3), SAMPLING, None))}
    _, rest = cut(engine, steps)
    # In another order, and only some of them.
    rest = rest[::-2]
    run = engine.start(rest, SAMPLING, None, keep_kv_cache=True)
    assert run.decoding().kept_responses == len(rest)
    assert {(each.prompt, each.index): each for each in finish(run)} == {
        (task.prompt, task.index): whole[task.prompt, task.index] for task in rest
    }
    assert run.computed.prompt == 0


def test_a_run_that_needs_a_larger_cache_computes_anew(engine: TransformersEngine) -> None:
    _, rest = cut(engine, 5)
    longer = SAMPLING.model_copy(update={"max_response_tokens": 80})
    assert engine.start(rest, longer, None, keep_kv_cache=True).decoding().kept_responses == 0
    _, rest = cut(engine, 5)
    more = [*rest, *(replace(task, prompt=task.prompt + 8, seed=~task.seed % 2**64) for task in share(8, 3))]
    run = engine.start(more, SAMPLING, None, keep_kv_cache=True)
    assert run.decoding().kept_responses == 0
    assert len(finish(run)) == len(more)


def test_a_step_that_failed_leaves_nothing(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    run, rest = cut(engine, 5)
    monkeypatch.setattr(ContinuousBatch, "_decode", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.step()
    monkeypatch.undo()
    assert engine.start(rest, SAMPLING, None, keep_kv_cache=True).decoding().kept_responses == 0
