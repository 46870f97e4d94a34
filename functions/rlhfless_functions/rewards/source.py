"""Find the user's file, run it once, and return its function."""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhfless_functions.rewards.signatures import DEFAULT, usual_function

_MODULE = "rlhfless_user_reward"
_FINDER = """import importlib.util, sys
spec = importlib.util.spec_from_file_location(__name__, {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules[__name__] = module
spec.loader.exec_module(module)
"""
"""Module by which processes that the reward starts import its file under the same name: `import` returns what is in
`sys.modules` in the end."""

_RELATIVE = "imports from its package, but a job loads one file alone: name a file of your own that says `from"


class SourceError(Exception):
    """The file or its function can't be used; the message says why and what to do."""


def load_function(file: str, function: str | None, scratch: Path, text: str | None = None) -> Callable[..., Any]:
    """Run a Python file and return one of its functions.

    New processes find the file's functions and classes, too: those of pools that spawn, of a fork server and of joblib.

    Args:
        file: path of the file, from whose folder it may import; with `text`, only its name.
        function: name of the function; by default the usual one.
        scratch: folder for files, which lives as long as this process.
        text: content of a file that is not on the local disk.

    Raises:
        SourceError: the file or the function is missing. Errors of the file itself are not caught.
    """
    module = run_file(file, scratch, text)
    function = function or _usual_function(module)
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


def _usual_function(module: ModuleType) -> str:
    if hasattr(module, DEFAULT):
        return DEFAULT
    assert module.__file__ is not None
    return usual_function(ast.parse(Path(module.__file__).read_bytes()).body)


def run_file(file: str, scratch: Path, text: str | None = None, module_name: str = _MODULE) -> ModuleType:
    """Run a Python file once, and return its module; again for the same name, the module that it is.

    Args:
        file: path of the file, from whose folder it may import; with `text`, only its name.
        scratch: folder for files, which lives as long as this process.
        text: content of a file that is not on the local disk.
        module_name: name under which it can be imported.

    Raises:
        SourceError: there is no such file. Errors of the file itself are not caught.
    """
    if module_name in sys.modules:
        return sys.modules[module_name]
    path = Path(file)
    if text is not None:
        path = scratch / "source" / module_name / path.name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    if not path.is_file():
        raise SourceError(f"there is no file {path}; set python.file to the path or URI of the file")
    path = path.resolve()
    # The file's own name may be that of another module, such as of the standard library, or no name of a module.
    (scratch / f"{module_name}.py").write_text(_FINDER.format(path=str(path)))
    sys.path[:0] = [str(path.parent), str(scratch)]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Pickle and dataclasses look a class's module up by its name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        raise SourceError(f"{file} {_RELATIVE} {_module_name(path)} import …`") from error
    return module


def _module_name(path: Path) -> str:
    """Return the name by which a file of a package is imported."""
    names = [path.stem]
    while (path := path.parent) and (path / "__init__.py").is_file():
        names.insert(0, path.name)
    return ".".join(names)
