"""Runs the tests of a response's code in a separate process: `python -I judge.py MEMORY CODE VERDICTS`.

Stands alone, like `runner`. Over the socket VERDICTS it sends `hidden` once no other process can inspect it, reads
{tests, first} in one line, runs the tests from `first` on, and sends one line each: `loaded`, `passed N`, `failed N`,
`end`. After `failed N` or instead of `loaded`, `memory` says that the code reached its limit, and `gone` that its
process ended. Names that a test does not define belong to the code. When the test uses them, the judge asks the code's
process over the socket CODE.

The code sees only the arguments of its functions, and nothing else of a test. The code never compares a value of the
test: an object without a plain value is unequal to every plain value.
"""

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import operator
import resource
import socket
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PR_SET_DUMPABLE = 4
_CODE_MODULE = "solution"

sys.path.insert(0, str(Path(__file__).parent))
import unit_kinds  # noqa: E402 - found beside this file
import values  # noqa: E402

del sys.path[0]


class GoneError(BaseException):
    """The process that runs the code of this test has ended."""


def main() -> None:
    # From here on, processes of the same user can't read its memory or its descriptors.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    memory, code, verdicts = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    worker = socket.socket(fileno=verdicts)

    def tell(what: str) -> None:
        worker.sendall(f"{what}\n".encode())

    tell("hidden")
    work = json.loads(worker.makefile().readline())
    tests: list[dict[str, Any]] = work["tests"]
    solution = Solution(socket.socket(fileno=code))
    if not solution.load():
        tell("memory")
        return
    tell("loaded")
    shadowed = shadowed_builtins([part for test in tests for part in (test.get("text", ""), test.get("entry", ""))])
    for number in range(work["first"], len(tests)):
        passed = holds(tests[number], solution, shadowed)
        tell(f"passed {number}" if passed else f"failed {number} {solution.fate}".rstrip())
    tell("end")


def holds(test: dict[str, Any], solution: "Solution", shadowed: set[str]) -> bool:
    """Return whether a test finishes without an error."""
    solution.begin()
    passed = False
    try:
        names = Names(solution, shadowed, "__main__" if test.get("main") else "test")
        sys.modules[_CODE_MODULE] = CodeModule(names)
        unit_kinds.run(test, names)
        passed = True
    except BaseException:
        pass
    if solution.ended:
        raise EOFError
    return solution.finish() and passed


def shadowed_builtins(tests: Sequence[str]) -> set[str]:
    """Return the builtins that stand for the code's functions of the same name, such as in `assert sum(10, 15) == 6`.

    This applies if the tests use no other name of the code. In `assert abs(root(2) - 1.4) < 0.1` the code can't replace
    `abs`.
    """
    used: set[str] = set()
    made: set[str] = set()
    for test in tests:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            for node in ast.walk(ast.parse(test)):
                if isinstance(node, ast.Name):
                    (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
                elif isinstance(node, ast.arg):
                    made.add(node.arg)
                elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                    made.add(node.name)
                elif isinstance(node, ast.alias):
                    made.add((node.asname or node.name).split(".")[0])
    free = used - made
    return set() if any(not hasattr(builtins, name) for name in free) else free


class Names(dict[str, Any]):
    """The names of one test: its own, Python's, and the code's, asked for each time."""

    def __init__(self, solution: "Solution", shadowed: set[str], name: str) -> None:
        super().__init__(__name__=name)
        self._solution = solution
        self._shadowed = shadowed

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and name not in self._shadowed:
            raise KeyError(name)
        return self.of_code(name)

    def of_code(self, name: str) -> Any:
        """Return what the code calls by this name.

        Raises:
            KeyError: it has no such name.
        """
        found = self._solution.ask("get", name)
        if isinstance(found, Remote) and (module := _of(found, "module")) is not None:
            # A module that the code imports is Python's original here, even if the code has changed it.
            if module.split(".")[0] not in {*sys.stdlib_module_names, "numpy"}:
                raise KeyError(name)
            return importlib.import_module(module)
        return found


class CodeModule(types.ModuleType):
    """The code as the module that tests import it from."""

    def __init__(self, names: Names) -> None:
        super().__init__(_CODE_MODULE)
        # Tests find the code's names without an import, too.
        self.__dict__.update(__all__=[], __getattr__=self._find)
        self._names = names

    def _find(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._names.of_code(name)
        except KeyError:
            raise AttributeError(name) from None


class Solution:
    """The judge's view of the process that runs the code."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._functions: list[Callable[..., Any]] = []
        self._exceptions: dict[int, type[BaseException]] = {}
        self.ended = False
        """True if the code's process has ended, or the present test has no fork of it."""
        self.fate = ""
        """`memory` if the code reached its limit in this test, `gone` if its process ended."""

    def load(self) -> bool:
        """Run the code. Returns False if it reached its limit of memory.

        Raises:
            EOFError: it does not finish.
        """
        self._send(("load",))
        return bool(values.loads(values.receive(self._connection), self._find, trusted=False) == ("loaded",))

    def begin(self) -> None:
        """Start a fork for a test."""
        self.fate = ""
        self._functions.clear()
        self._exceptions.clear()
        self._send(("test",))
        self._forked = True

    def finish(self) -> bool:
        """Let the fork end. Returns whether it survived until then."""
        if not self._forked:
            return False
        self._send(("end",))
        while self._receive()[0] != "gone":
            pass
        return True

    def ask(self, what: str, *given: Any) -> Any:
        """Make the code's process do something. Returns the result or raises its exception."""
        if not self._forked:
            raise GoneError
        self._send((what, *given))
        while True:
            kind, *answer = self._receive()
            if kind == "gone":
                self._forked, self.fate = False, "gone"
                raise GoneError
            if kind == "call":
                self._answer_call(*answer)
                continue
            if kind == "raised":
                if answer[0] is MemoryError:
                    self.fate = "memory"
                raise _exception(*answer, of_next=given[:1] == ("__next__",))
            value, changed = answer
            if what == "call":
                _take_changes(given[1], changed)
            return value

    def _answer_call(self, number: int, arguments: list[Any], options: dict[str, Any]) -> None:
        try:
            self._send(("answer", self._functions[number](*arguments, **options)))
        except Exception as error:
            self._send(("raised", type(error).__name__, str(error)))

    def _send(self, message: tuple[Any, ...]) -> None:
        values.send(self._connection, values.dumps(message, self._name))

    def _receive(self) -> Any:
        try:
            payload = values.receive(self._connection)
        except EOFError:
            self.ended = True
            raise
        return values.loads(payload, self._find, trusted=False)

    def _name(self, value: Any) -> Any:
        if type(value) is Remote:
            return ("code", _of(value, "number"))
        if isinstance(value, type) and issubclass(value, BaseException):
            return next((("code", number) for number, kind in self._exceptions.items() if kind is value), None)
        if isinstance(value, types.FunctionType) and isinstance(value.__globals__, Names):
            self._functions.append(value)
            return ("judge", len(self._functions) - 1)
        return None

    def _find(self, name: Any) -> Any:
        if name[0] == "judge":
            return self._functions[name[1]]
        if name[0] == "exception":
            _, number, own_name, base_name = name
            base = getattr(builtins, str(base_name))
            if not (isinstance(base, type) and issubclass(base, BaseException)):
                raise values.ValueRefusedError(base_name)
            if number is None:
                return base
            return self._exceptions.setdefault(number, type(str(own_name), (base,), {}))
        _, number, base_name, module = name
        return Remote(self, int(number), base_name, module)


def _exception(kind: Any, arguments: Sequence[Any], *, of_next: bool) -> BaseException:
    # Outside an iteration of the code, it would silently end one of the test.
    if not (isinstance(kind, type) and issubclass(kind, BaseException)) or (
        issubclass(kind, StopIteration | StopAsyncIteration | GeneratorExit) and not of_next
    ):
        return RuntimeError(str(arguments))
    try:
        return kind(*arguments)
    except Exception:
        return RuntimeError(str(arguments))


def _take_changes(given: list[Any], changed: Any) -> None:
    """Apply the code's in-place changes of its arguments for the test."""
    for old, new in zip(given, changed, strict=False):
        if type(old) is type(new) and old is not new:
            if isinstance(old, list | bytearray):
                old[:] = new
            elif isinstance(old, dict | set):
                old.clear()
                old.update(new)


_MISSING = object()


class Remote:
    """An object of the code. Operations on it ask the code's process. It equals a plain value only if it is one."""

    def __init__(self, solution: Solution, number: int, base: str | None, module: str | None) -> None:
        for name, value in {"solution": solution, "number": number, "base": base, "module": module}.items():
            object.__setattr__(self, f"_remote_{name}", value)

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__instancecheck__"):
            return object.__getattribute__(self, name)
        return _of(self, "solution").ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _of(self, "solution").ask("operate", "__setattr__", self, name, value)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _of(self, "solution").ask("call", self, list(arguments), options)

    def __contains__(self, value: Any) -> bool:
        return any(value is item or value == item for item in self)  # type: ignore[attr-defined]

    def __instancecheck__(self, instance: Any) -> bool:
        return _of(self, "solution").ask("operate", "__isinstance__", instance, self) is True

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        base = _of(self, "base")
        return Remote if base is None else getattr(builtins, base)


def _of(remote: Remote, name: str) -> Any:
    return object.__getattribute__(remote, f"_remote_{name}")


def _plain(value: Any) -> Any:
    """Return the plain value of an object of the code; `_MISSING` if it has none."""
    if type(value) is not Remote:
        return value
    if _of(value, "base") is None:
        return _MISSING
    plain = _of(value, "solution").ask("plain", value)
    return plain if type(plain) in values.PLAIN else _MISSING


def _asked(name: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        return _of(self, "solution").ask("operate", name, self, *arguments)

    return method


def _compared(name: str, operation: Callable[[Any, Any], Any], *, reflected: bool = False) -> Callable[..., Any]:
    """Return a binary operation: in the code's process between its own objects, in this process with a value of the
    test."""

    def method(self: Remote, other: Any) -> Any:
        if type(other) is Remote:
            return _of(self, "solution").ask("operate", name, self, other)
        plain = _plain(self)
        if plain is _MISSING:
            return NotImplemented
        return operation(other, plain) if reflected else operation(plain, other)

    return method


_UNARY = ("abs", "bool", "complex", "delitem", "enter", "exit", "float", "format", "getitem", "hash", "index", "int")
_UNARY += ("invert", "iter", "len", "neg", "next", "pos", "repr", "reversed", "round", "setitem", "str")
for _name in _UNARY:
    setattr(Remote, f"__{_name}__", _asked(f"__{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _compared(f"__{_name}__", getattr(operator, _name)))
_BINARY = ("add", "and_", "floordiv", "lshift", "matmul", "mod", "mul", "or_", "pow", "rshift", "sub", "truediv", "xor")
for _name in _BINARY:
    _operation, _stem = getattr(operator, _name), _name.strip("_")
    setattr(Remote, f"__{_stem}__", _compared(f"__{_stem}__", _operation))
    setattr(Remote, f"__r{_stem}__", _compared(f"__{_stem}__", _operation, reflected=True))

if __name__ == "__main__":
    main()
