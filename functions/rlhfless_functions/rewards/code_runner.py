"""Runs a response's code in its own process: `python -I code_runner.py program|asserts MEMORY [DESCRIPTOR]`.

Stands alone: the interpreter is isolated and imports nothing of this package. The code is `solution.py` in the
working folder.

`program`: run it as a script. `asserts`: read {word, tests} from standard input, run the code once, then each test
in a fork, so that no test sees another's traces; tell on DESCRIPTOR, each line led by the word: `loaded`,
`passed N`, `done N`, `end`.
"""

import json
import os
import resource
import sys
from pathlib import Path

_WRITTEN_BYTES = 64 * 2**20


def main() -> None:
    mode, memory = sys.argv[1], int(sys.argv[2])
    descriptor = int(sys.argv[3]) if mode == "asserts" else -1
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_WRITTEN_BYTES, _WRITTEN_BYTES))
    sys.argv[:] = ["solution.py"]
    code = compile(Path("solution.py").read_text(), "solution.py", "exec")
    if mode == "program":
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        _asserts(code, descriptor)


def _asserts(code: object, descriptor: int) -> None:
    work = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def tell(what: str) -> None:
        os.write(descriptor, f"{work['word']} {what}\n".encode())

    names: dict[str, object] = {"__name__": "solution", "__builtins__": __builtins__}
    exec(code, names)  # type: ignore[arg-type]
    tell("loaded")
    for number, test in enumerate(work["tests"]):
        child = os.fork()
        if child == 0:
            try:
                exec(compile(test, "test", "exec"), names)
                tell(f"passed {number}")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        tell(f"done {number}")
    tell("end")


main()
