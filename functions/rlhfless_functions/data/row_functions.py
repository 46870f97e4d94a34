"""The functions `map` and `filter` of a user for the rows of a source."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.data.rows import Row
from rlhfless_functions.settings import RowFunction

_MODULE = "rlhfless_row_functions"


class RowFunctionError(Exception):
    """A function is missing, or fails for a row; the message says which row, by its number in the source."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def applied(rows: list[Row], mapped: RowFunction | None, kept: RowFunction | None) -> tuple[list[Row], list[int]]:
    """Return the rows that `map` makes and `filter` keeps, and their numbers before.

    Raises:
        RowFunctionError: a function is missing, raises, or returns something else.
    """
    change = None if mapped is None else _load(mapped, "map")
    keep = None if kept is None else _load(kept, "filter")
    found: list[Row] = []
    numbers: list[int] = []
    for number, row in enumerate(rows):
        if change is not None:
            made = _call(change, row, number, "map")
            if not isinstance(made, dict):
                raise RowFunctionError(f"data.map returned {type(made).__name__}, not a dict of columns", number)
            row = {**row, **made}
        if keep is None or _call(keep, row, number, "filter"):
            found.append(row)
            numbers.append(number)
    return found, numbers


def _call(function: Callable[..., Any], row: Row, number: int, name: str) -> Any:
    try:
        return function(dict(row), number) if _takes_two(function) else function(dict(row))
    except (Exception, SystemExit) as error:
        raise RowFunctionError(f"data.{name} raised {type(error).__name__}: {error}", number) from error


def _takes_two(function: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    required = [each for each in parameters if each.kind in positional and each.default is each.empty]
    return len(required) > 1


def _load(named: RowFunction, field: str) -> Callable[..., Any]:
    try:
        module = _run(named.file)
    except artifacts.ArtifactError:
        raise
    except (Exception, SystemExit) as error:
        raise RowFunctionError(f"data.{field}: {named.file} raised {type(error).__name__}: {error}") from error
    found = getattr(module, named.function, None)
    if not callable(found):
        have = ", ".join(name for name, value in vars(module).items() if inspect.isfunction(value)) or "no functions"
        raise RowFunctionError(f"data.{field}: {named.file} has no function {named.function}; it has {have}")
    return found  # type: ignore[no-any-return]


def _run(file: str) -> ModuleType:
    path = artifacts.local_path(file)
    if path is None:
        module = ModuleType(_MODULE)
        exec(compile(artifacts.read_bytes(file), file, "exec"), vars(module))
        return module
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError("its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    return module
