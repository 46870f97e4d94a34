"""Which sequences join a batch next, and in which rows."""

from collections import deque
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.generation.engines.admission import LeftRows, admit
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.kept_rows import HeldRow
from rlhfless_functions.generation.engines.kv_cache import padded

SLOTS = 8
TASKS = [SequenceTask(number // 2, number % 2, [2] * 40, seed=number) for number in range(12)]
SAID = [5, 6, 7]


def back(number: int) -> SequenceTask:
    return replace(TASKS[number], response_tokens=[*SAID, 8, 9], log_probs=[0.0] * 5)


@given(
    st.permutations(range(12)),
    st.lists(st.integers(0, SLOTS - 1), unique=True),
    st.sets(st.integers(0, SLOTS - 1)),
    st.integers(0, 400),
)
def test_sequences_join_in_their_order_and_get_the_rows_that_they_have_left(
    order: list[int], left_slots: list[int], taken: set[int], most_tokens: int
) -> None:
    left = LeftRows()
    for number, slot in enumerate(left_slots):
        left.leave(HeldRow(slot, TASKS[number], SAID))
    taken -= set(left_slots)
    own = dict(enumerate(left_slots))
    waiting = deque(back(number) if number in own else TASKS[number] for number in order)
    before = list(waiting)
    empty = set(range(SLOTS)) - taken
    admitted = admit(waiting, empty, left, {0}, most_tokens)
    joined = list(admitted.tasks.values())
    assert joined == before[: len(joined)] and list(waiting) == before[len(joined) :]
    assert set(admitted.tasks) <= empty
    assert len(joined) == len(admitted.tasks) >= min(1, len(empty))
    for slot, task in admitted.tasks.items():
        if slot in admitted.continued and admitted.continued[slot][1]:
            assert own[task.seed] == slot and admitted.continued[slot] == (task, len(SAID))
        else:
            assert admitted.fresh[slot] == task
    assert not set(left.slots) & set(admitted.tasks)
    if len(joined) > 1:
        prompts = {task.prompt for task in admitted.fresh.values()} - {0}
        work = padded(40) * len(prompts)
        work += sum(len(task.response_tokens) - done for task, done in admitted.continued.values())
        assert work <= most_tokens


def test_a_row_that_was_left_is_the_last_that_another_sequence_gets() -> None:
    left = LeftRows()
    for number, slot in enumerate([3, 1]):
        left.leave(HeldRow(slot, TASKS[number], SAID))
    admitted = admit(deque(TASKS[4:8]), range(4), left, (), 10_000)
    assert list(admitted.tasks) == [0, 2, 3, 1]
