"""Tables on standard output, readable in a file too, and progress bars on standard error."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from rlhfless_operator.formatting import printable

_FILE_WIDTH = 160


class PlainConsole(Console):
    """A console that shows the control characters of a text, instead of obeying them: responses, and names and messages
    of others, are texts too."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def print_tables(view: RenderableType) -> None:
    """Print tables in the terminal's width. In a pipe or a file they have room for all their columns."""
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    PlainConsole(width=None if fixed else _FILE_WIDTH).print(view)


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar where standard error is a terminal. Each call of the yielded function advances it by one."""
    console = PlainConsole(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
