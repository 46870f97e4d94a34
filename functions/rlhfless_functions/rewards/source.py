"""Find the user's file, run it once, and return its function."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE = "rlhfless_user_reward"


class SourceError(Exception):
    """The file or its function can't be used; the message says why and what to do."""


def load_function(file: str, function: str, text: str | None = None) -> Callable[..., Any]:
    """Run a Python file and return one of its functions.

    Args:
        file: path of the file, from whose folder it may import; with `text`, only its name.
        function: name of the function.
        text: content of a file that is not on the local disk.

    Raises:
        SourceError: the file or the function is missing. Errors of the file itself are not caught.
    """
    module = _run_path(Path(file)) if text is None else _run_text(file, text)
    found = getattr(module, function, None)
    if found is None:
        have = sorted(
            name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")
        )
        raise SourceError(
            f"{file} has no function {function!r}; it has {', '.join(have) or 'no functions'}:"
            " set python.function to one of them"
        )
    if not callable(found):
        raise SourceError(f"{function!r} in {file} is not a function but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _run_path(path: Path) -> ModuleType:
    if not path.is_file():
        raise SourceError(f"there is no file {path}; set python.file to the path or URI of the reward's file")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Pickle and dataclasses look a class's module up by its name.
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    return module


def _run_text(name: str, text: str) -> ModuleType:
    module = ModuleType(_MODULE)
    module.__file__ = name
    sys.modules[_MODULE] = module
    exec(compile(text, name, "exec"), vars(module))
    return module
