"""The exit of a command that failed."""

from typing import NoReturn

import typer

from rlhfless_operator.formatting import printable


def complain(message: str) -> None:
    """Print a message to standard error."""
    typer.echo(printable(message), err=True)


def fail(message: str, status: int = 1) -> NoReturn:
    """Print one error to standard error and exit with `status`. Faults of a job document (2) name themselves."""
    complain(f"error: {message}" if status != 2 else message)
    raise SystemExit(status)
