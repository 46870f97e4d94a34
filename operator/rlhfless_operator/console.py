"""Tables on standard output, readable in a file too."""

import os
import sys

from rich.console import Console, RenderableType

_FILE_WIDTH = 160


def print_tables(view: RenderableType) -> None:
    """Print tables in the terminal's width. In a pipe or a file they have room for all their columns."""
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if fixed else _FILE_WIDTH).print(view)
