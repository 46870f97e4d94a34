"""The data cursor: every prompt once an epoch, never twice in a step, and the same after a restart."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.training.data.cursor import DataCursor


@given(prompts=st.integers(1, 40), draws=st.lists(st.integers(1, 40), max_size=30), seed=st.integers(0, 5))
def test_prompts_are_used_evenly_and_never_twice_in_a_step(prompts: int, draws: list[int], seed: int) -> None:
    cursor = DataCursor(prompts, seed, shuffle=True)
    uses: Counter[int] = Counter()
    for count in draws:
        drawn = cursor.draw(min(count, prompts))
        assert len(set(drawn)) == len(drawn)
        uses.update(drawn)
    drawn_and_deferred = Counter(uses)
    drawn_and_deferred.update(cursor.state()["deferred"])
    counts = [drawn_and_deferred[prompt] for prompt in range(prompts)]
    assert max(counts) - min(counts) <= 1


@given(prompts=st.integers(4, 30), before=st.integers(0, 10), after=st.integers(1, 10))
def test_a_restored_cursor_goes_on_where_the_other_was(prompts: int, before: int, after: int) -> None:
    undisturbed = DataCursor(prompts, 7, shuffle=True)
    for _ in range(before):
        undisturbed.draw(3)
    restored = DataCursor(prompts, 7, shuffle=True).restored(undisturbed.state())
    assert [restored.draw(3) for _ in range(after)] == [undisturbed.draw(3) for _ in range(after)]


def test_every_epoch_has_its_own_order() -> None:
    cursor = DataCursor(20, 0, shuffle=True)
    first, second = cursor.draw(20), cursor.draw(20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_without_shuffling_the_order_is_the_datasets() -> None:
    cursor = DataCursor(5, 0, shuffle=False)
    assert cursor.draw(3) + cursor.draw(2) == [0, 1, 2, 3, 4]


def test_a_replacement_is_none_of_the_steps_own_prompts() -> None:
    cursor = DataCursor(6, 0, shuffle=False)
    taken = cursor.draw(4)
    assert cursor.draw(2, taken=taken) == [4, 5]
    assert cursor.draw(2, taken=[0, 1]) == [2, 3]
    assert cursor.draw(2) == [0, 1], "deferred prompts come first"


def test_too_few_prompts_for_a_step_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"needs 5 different prompts and data\.source has 4; lower batch"):
        DataCursor(4, 0, shuffle=True).draw(5)
