"""Tables on standard output, readable in a file too, and progress bars on standard error."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_FILE_WIDTH = 160


def print_tables(view: RenderableType) -> None:
    """Print tables in the terminal's width. In a pipe or a file they have room for all their columns."""
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if fixed else _FILE_WIDTH).print(view)


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar where standard error is a terminal. Each call of the yielded function advances it by one."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
