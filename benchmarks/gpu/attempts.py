"""Measurements of which one may fail without the others being lost."""

import traceback
from collections.abc import Callable, Iterator
from typing import Any


def attempt(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What an action measures, or `failed` with the reason; the traceback goes to standard error."""
    try:
        return action()
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def failures(measured: Any, *where: str) -> Iterator[str]:
    """What failed anywhere in a result, a line each.

    Args:
        measured: the result, or what is at `where` in it.
        where: its keys, from the outermost.
    """
    if not isinstance(measured, dict):
        return
    if "failed" in measured:
        yield f"{': '.join(where)} failed: {measured['failed']}"
    for key, value in measured.items():
        yield from failures(value, *where, key)
