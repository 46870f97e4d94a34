"""Runs a response's code in its own process: `python -I runner.py MODE MEMORY RULES FILTER ASKS [DESCRIPTOR]`.

Stands alone: the interpreter is isolated and imports nothing of this package but `keeper` and `values`. The code is
`solution.py` in the working folder. `before.py`, if there is one, runs before it in the same namespace. RULES is the
descriptor of Landlock's rules or -1, FILTER the seccomp filter in hexadecimal, ASKS is 1 if it asks the keeper.

MODE is `program`: run it as a script. Or `asserts`: run it once, then answer the judge's requests over DESCRIPTOR. Each
test has a fork of its own, without traces of the others. This process knows only the values that a test passes to the
code. The judge decides whether a test passes.
"""

import builtins
import contextlib
import ctypes
import importlib
import mmap
import operator
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

WRITTEN_BYTES = 64 * 2**20
"""Bytes of the largest file that the code may write."""
OPEN_FILES = 256
"""Files that a process of the code may have open."""
OUT_OF_MEMORY = 77
"""Exit code of a program that reached its limit of memory."""
NOT_BEGUN = 78
"""Exit code if the program could not begin; see `keeper`."""


def main() -> None:
    mode, memory, rules, code, asks, *more = sys.argv[1:]
    try:
        values = _confined(int(memory), int(rules), bytes.fromhex(code), asks == "1", tuple(map(int, more)))
    except BaseException:
        os._exit(NOT_BEGUN)
    sys.argv[:] = ["solution.py"]
    source = Path("solution.py").read_text()
    if mode == "program":
        try:
            exec(compile(source, "solution.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
    else:
        _serve(source, socket.socket(fileno=int(more[0])), values)


def _confined(memory: int, rules: int, code: bytes, asks: bool, kept: tuple[int, ...]) -> Any:
    """Return in a process that is confined and kept, with the module `values` if the mode needs it."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN_BYTES, WRITTEN_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    _share_semaphores()
    # Found beside this file, where the code can't read.
    sys.path.insert(0, str(Path(__file__).parent))
    keeper, values = importlib.import_module("keeper"), importlib.import_module("values") if kept else None
    del sys.path[0]
    keeper.split(rules, code, asks=asks, close=kept, memory=memory, out_of_memory=OUT_OF_MEMORY)
    return values


def _share_semaphores() -> None:
    """Let `multiprocessing` keep its locks in memory that forks share. Python's own are files of /dev/shm, which the
    program may not write to."""
    import _multiprocessing

    libc = ctypes.CDLL(None)

    class SemLock(_multiprocessing.SemLock):  # type: ignore[name-defined,misc]
        def __new__(cls, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> "SemLock":
            memory = mmap.mmap(-1, 64)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            libc.sem_init(ctypes.c_void_p(address), 1, value)
            lock: SemLock = cls._rebuild(address, kind, maxvalue, None)
            lock.memory = memory
            return lock

    _multiprocessing.SemLock = SemLock


def _serve(source: str, connection: socket.socket, values: Any) -> None:
    # The judge sends requests once it is out of reach.
    values.receive(connection)
    names: dict[str, object] = {"__name__": "solution", "__builtins__": __builtins__}
    before = Path("before.py")
    try:
        if before.exists():
            with contextlib.suppress(Exception):
                exec(compile(before.read_text(), "before.py", "exec"), names)
        exec(compile(source, "solution.py", "exec"), names)
    except MemoryError:
        values.send(connection, values.dumps(("memory",), lambda value: None))
        return
    values.send(connection, values.dumps(("loaded",), lambda value: None))
    while True:
        if values.loads(values.receive(connection), lambda name: None, trusted=True) != ("test",):
            continue  # Meant for a fork that has ended before its test.
        child = os.fork()
        if child == 0:
            try:
                _Served(values, connection, names).answer_all()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        values.send(connection, values.dumps(("gone",), lambda value: None))


_OPERATIONS = {
    **{f"__{name}__": getattr(builtins, name) for name in (
        "abs", "bool", "complex", "float", "hash", "int", "iter", "len", "next", "repr", "reversed", "round", "str",
        "format", "isinstance", "setattr",
    )},
    **{f"__{name.strip('_')}__": getattr(operator, name) for name in (
        "add", "and_", "delitem", "eq", "floordiv", "ge", "getitem", "gt", "index", "invert", "le", "lshift", "lt",
        "matmul", "mod", "mul", "ne", "neg", "or_", "pos", "pow", "rshift", "setitem", "sub", "truediv", "xor",
    )},
    "__enter__": lambda value: value.__enter__(),
    "__exit__": lambda value, *reason: value.__exit__(*reason),
}  # fmt: skip


class _Served:
    """Answers the judge's requests to the code, in the fork of one test."""

    def __init__(self, values: Any, connection: socket.socket, names: dict[str, object]) -> None:
        self._values = values
        self._connection = connection
        self._names = names
        self._kept: list[object] = []
        self._numbers: dict[int, int] = {}

    def answer_all(self, *, in_callback: bool = False) -> Any:
        """Answer until the test ends, or until the judge answers the code's own question."""
        while True:
            what, *given = self._values.loads(self._values.receive(self._connection), self._find, trusted=True)
            if what == "end":
                os._exit(0)
            if in_callback and what == "answer":
                return given[0]
            if in_callback and what == "raised":
                raise getattr(builtins, given[0], RuntimeError)(given[1])
            try:
                # The answer includes in-place changes of the arguments.
                answer = ("value", getattr(self, f"_{what}")(*given), given[1] if what == "call" else ())
                payload = self._values.dumps(answer, self._name)
            except BaseException as error:
                plain = [item if type(item) in self._values.PLAIN[:8] else repr(item) for item in error.args]
                payload = self._values.dumps(("raised", type(error), plain), self._name)
            self._values.send(self._connection, payload)

    def _get(self, name: str) -> object:
        if name not in self._names:
            raise KeyError(name)
        return self._names[name]

    def _call(self, target: Any, arguments: list[Any], options: dict[str, Any]) -> object:
        return target(*arguments, **options)

    def _attribute(self, target: Any, name: str) -> object:
        return getattr(target, name)

    def _operate(self, name: str, *arguments: Any) -> object:
        return _OPERATIONS[name](*arguments)

    def _plain(self, value: Any) -> object:
        return next(base(value) for base in self._values.PLAIN[2:] if isinstance(value, base))

    def _name(self, value: Any) -> Any:
        if isinstance(value, _Callback):
            return ("judge", value.number)
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(kind.__name__ for kind in value.__mro__ if kind.__module__ == "builtins")
            builtin = value.__module__ == "builtins"
            return ("exception", None if builtin else self._keep(value), value.__name__, base)
        if self._values.travels(value):
            return None
        module = value.__name__ if isinstance(value, type(sys)) else None
        base = next((base.__name__ for base in self._values.PLAIN[2:] if isinstance(value, base)), None)
        return ("code", self._keep(value), base, module)

    def _keep(self, value: object) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._numbers[id(value)]

    def _find(self, name: Any) -> object:
        side, number = name
        return _Callback(self, number) if side == "judge" else self._kept[number]

    def ask_judge(self, number: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        question = ("call", number, list(arguments), options)
        self._values.send(self._connection, self._values.dumps(question, self._name))
        return self.answer_all(in_callback=True)


class _Callback:
    """A function of the test that was passed to the code."""

    def __init__(self, served: _Served, number: int) -> None:
        self._served = served
        self.number = number

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._served.ask_judge(self.number, arguments, options)


if __name__ == "__main__":
    main()
