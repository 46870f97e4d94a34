"""The sequences that join a batch next, and the rows that they get."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.kv_cache import padded
from rlhfless_functions.generation.engines.left_rows import LeftRows


@dataclass(frozen=True)
class Admitted:
    """Sequences that join, by their slots."""

    tasks: dict[int, SequenceTask] = field(default_factory=dict)
    continued: dict[int, tuple[SequenceTask, int]] = field(default_factory=dict)
    """Those that have response tokens, and how many of these their rows have."""

    @property
    def fresh(self) -> dict[int, SequenceTask]:
        """Those whose rows have nothing of theirs."""
        return {slot: task for slot, task in self.tasks.items() if not self.continued.get(slot, (task, 0))[1]}


def admit(
    waiting: deque[SequenceTask], empty: Iterable[int], left: LeftRows, known: Collection[int], most_tokens: int
) -> Admitted:
    """Take sequences that wait, in order, while there are slots for them.

    A sequence that comes back gets the row that it has left. Others get rows that none has left, and after those the
    one that was left first.

    Args:
        waiting: sequences that wait. Those that join are removed.
        empty: slots without a sequence.
        left: rows that sequences have left. Those that others get are removed.
        known: prompts whose keys and values need not be computed.
        most_tokens: most tokens to compute for the sequences together, unless the first one has more.
    """
    admitted, prefilled, work = Admitted(), set[int](), 0
    usable = set(empty)
    last = [slot for slot in left.slots if slot in usable]
    free = [*sorted(usable.difference(last)), *last]
    while waiting and free:
        task = waiting[0]
        row = left.find(task)
        done = 0 if row is None else len(row.response_tokens)
        work += len(task.response_tokens) - done
        if row is None and task.prompt not in known and task.prompt not in prefilled:
            work += padded(len(task.prompt_tokens))
        if admitted.tasks and work > most_tokens:
            break
        slot = free[0] if row is None else row.slot
        free.remove(slot)
        left.take({slot})
        admitted.tasks[slot] = waiting.popleft()
        if task.response_tokens:
            admitted.continued[slot] = task, done
        if row is None:
            prefilled.add(task.prompt)
    return admitted
