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


@given(
    mix=st.lists(st.tuples(st.integers(1, 7), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0])), min_size=2, max_size=3),
    epochs=st.integers(1, 8),
    shuffle=st.booleans(),
)
def test_rows_of_several_sources_come_as_often_as_their_weights_say(
    mix: list[tuple[int, float]], epochs: int, shuffle: bool
) -> None:
    cursor = DataCursor(sum(count for count, _ in mix), 3, shuffle=shuffle, mix=mix)
    total = cursor.prompts_in(epochs)
    drawn = [cursor.draw(1)[0] for _ in range(total)]
    first = 0
    for count, weight in mix:
        visits = [drawn.count(row) for row in range(first, first + count)]
        assert max(visits) - min(visits) <= 1
        assert sum(visits) == int(count * weight * epochs)
        first += count
    again = DataCursor(sum(count for count, _ in mix), 3, shuffle=shuffle, mix=mix)
    half = [again.draw(1)[0] for _ in range(total // 2)]
    resumed = again.restored(again.state())
    assert half + [resumed.draw(1)[0] for _ in range(total - len(half))] == drawn


def test_sources_of_equal_weight_are_drawn_as_one() -> None:
    plain, mixed = (DataCursor(9, 5, shuffle=True, mix=mix) for mix in (None, [(4, 1.0), (5, 1.0)]))
    assert [plain.draw(3) for _ in range(6)] == [mixed.draw(3) for _ in range(6)]
