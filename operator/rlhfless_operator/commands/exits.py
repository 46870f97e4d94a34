"""The exit of a command that failed."""

from typing import NoReturn

import typer


def fail(message: str, status: int = 1) -> NoReturn:
    """Print one error to standard error and exit with `status`. Faults of a job document (2) name themselves."""
    typer.echo(f"error: {message}" if status != 2 else message, err=True)
    raise SystemExit(status)
