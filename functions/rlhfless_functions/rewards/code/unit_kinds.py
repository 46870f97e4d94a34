"""The kinds of tests of `data.code_tests.units`, as the judge runs them. Stands alone beside the judge."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Modules that take long to load are imported where a test needs them: each test's time counts from the judge's start.


def run(test: dict[str, Any], names: Any) -> None:
    """Run a test.

    Args:
        test: the test.
        names: its namespace, in which the code's names are found too.

    Raises:
        BaseException: it fails.
    """
    kind = test["kind"]
    if kind == "call":
        _call(test, names)
        return
    exec(compile(test["text"], "test", "exec"), names)
    if kind == "function":
        function = names[test["name"]]
        for arguments in parameter_sets(function):
            _finish(function(**arguments))
    elif kind == "method":
        _method(names[test["owner"]], test["name"])
    elif kind == "check":
        names["check"](eval(compile(test["entry"], "entry_point", "eval"), names))


def parameter_sets(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each of a test's runs under `pytest.mark.parametrize`; once none without it."""
    sets: list[list[dict[str, Any]]] = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            named, given = (*mark.args, *mark.kwargs.values())[:2]
            words = [word.strip() for word in named.split(",")] if isinstance(named, str) else list(named)
            sets.append([dict(zip(words, _row(item, len(words)), strict=True)) for item in given])
    for chosen in itertools.product(*sets):
        yield {name: value for each in chosen for name, value in each.items()}


def _row(item: Any, width: int) -> Any:
    if hasattr(item, "marks"):  # pytest.param
        return item.values
    return [item] if width == 1 else item


def _method(owner: type, name: str) -> None:
    unittest = sys.modules.get("unittest")
    if unittest is not None and issubclass(owner, unittest.TestCase):
        result = unittest.TestResult()
        unittest.TestSuite([owner(name)]).run(result)
        if not result.wasSuccessful() or result.skipped or result.testsRun != 1:
            raise AssertionError
        return
    for arguments in parameter_sets(getattr(owner, name)):
        instance = owner()
        method = getattr(instance, name)
        for hook in ("setup_class", "setup_method"):
            _hook(instance, hook, method)
        _finish(method(**arguments))
        _hook(instance, "teardown_method", method)


def _hook(instance: Any, name: str, method: Any) -> None:
    hook = getattr(instance, name, None)
    if hook is not None:
        import inspect

        hook(*([method] if inspect.signature(hook).parameters else []))


def _finish(returned: Any) -> None:
    if type(returned).__name__ == "coroutine":
        import asyncio

        asyncio.run(returned)


def _call(test: dict[str, Any], names: Any) -> None:
    """Call the code's function, or its method in a class `Solution`, as in LeetCode, and compare the result."""
    owner = _code_name(names, "Solution")
    function = None
    if owner is not None:
        try:
            function = getattr(owner(), test["name"])
        except AttributeError:
            function = None
    function = function or _code_name(names, test["name"])
    if function is None:
        raise AssertionError
    got, expected = _plain(function(*test["arguments"])), test["expected"]
    if not _same(got, expected) and not (test["either"] and _same(got, expected[0])):
        raise AssertionError


def _code_name(names: Any, name: str) -> Any:
    try:
        return names.of_code(name)
    except KeyError:
        return None


def _plain(value: Any) -> Any:
    """Return a value as JSON would have it: tuples are lists, keys are text, NumPy's values are Python's."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if type(value).__module__.partition(".")[0] == "numpy":
        return _plain(value.tolist())
    return value


def _same(got: Any, expected: Any) -> bool:
    """Return whether a result equals JSON's value; numbers with a decimal point may differ by a millionth."""
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_same(got[key], expected[key]) for key in got)
    if isinstance(got, int | float) and isinstance(expected, int | float) and float in (type(got), type(expected)):
        return math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)
    return bool(got == expected)
