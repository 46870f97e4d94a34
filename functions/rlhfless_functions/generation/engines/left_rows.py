"""Rows whose sequences have left the batch and may come back with more tokens: those of environments do."""

from collections.abc import Mapping

from rlhfless_functions.generation.engines.base import SequenceKey, SequenceTask
from rlhfless_functions.generation.engines.kept_rows import HeldRow


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

    def move(self, moves: Mapping[int, int]) -> None:
        """Note that rows move to other slots."""
        self._rows = {
            key: HeldRow(moves.get(row.slot, row.slot), row.task, row.response_tokens)
            for key, row in self._rows.items()
        }
