"""The sequences that join a batch next, and the rows that they get: those that they have left, as with environments, or
others."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from rlhfless_functions.generation.engines.base import SequenceKey, SequenceTask
from rlhfless_functions.generation.engines.kept_rows import HeldRow
from rlhfless_functions.generation.engines.kv_cache import padded


class LeftRows:
    """The rows that sequences have left. Each keeps its keys and values until another sequence needs the row."""

    def __init__(self) -> None:
        self._rows: dict[SequenceKey, HeldRow] = {}
        """The first one was left first."""

    @property
    def slots(self) -> list[int]:
        """Slots of these rows, in the order in which sequences need them: the one that was left first comes first."""
        return [row.slot for row in self._rows.values()]

    def leave(self, row: HeldRow) -> None:
        """Add a row whose sequence leaves the batch now."""
        self._rows.pop(row.task.key, None)
        self._rows[row.task.key] = row

    def find(self, task: SequenceTask) -> HeldRow | None:
        """Return the row that a sequence has left, if it comes back with the same tokens and maybe more."""
        row = self._rows.get(task.key)
        return row if row is not None and row.is_continued_by(task) else None

    def take(self, slots: set[int]) -> None:
        """Forget the rows of slots that sequences take now."""
        self._rows = {key: row for key, row in self._rows.items() if row.slot not in slots}

    def swap(self, moves: Mapping[int, int]) -> dict[int, int]:
        """Let rows that are in the way change places with those that come.

        Args:
            moves: slots from which rows come, by the slots that they go to.

        Returns:
            Those of the moves that have such a row in the way.
        """
        swapped = {slot: moves[slot] for slot in self.slots if slot in moves}
        self._rows = {
            key: HeldRow(moves.get(row.slot, row.slot), row.task, row.response_tokens)
            for key, row in self._rows.items()
        }
        return swapped


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
