"""The lines that arrive for a task while it runs."""

import threading
from collections import deque

from rlhfless_functions.api import Line
from rlhfless_functions.runtime.activity import limited_wait


class Inbox:
    """Lines in their order. The server puts them in; the task takes them out, in another thread.

    Args:
        closed: whether no lines come at all.
    """

    def __init__(self, *, closed: bool = False) -> None:
        self._changed = threading.Condition()
        self._lines: deque[Line] = deque()
        self._closed = closed

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def is_over(self) -> bool:
        """Whether no line is there, and none comes."""
        with self._changed:
            return self._closed and not self._lines

    def put(self, line: Line) -> None:
        """Add a line."""
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    def close(self) -> None:
        """Note that no more lines come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, seconds: float) -> list[Line]:
        """Return all lines that are there. Wait for one for at most so long."""
        with limited_wait(seconds), self._changed:
            if seconds:
                self._changed.wait_for(lambda: self._lines or self._closed, seconds)
            lines = list(self._lines)
            self._lines.clear()
        return lines
