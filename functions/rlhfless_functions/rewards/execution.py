"""Unit tests of the code that a response holds, each run in a process of its own.

What holds the code: no network (a namespace of its own where the kernel permits one, and no sockets but Unix ones
anyway), limits on memory, time and written bytes, an empty environment and working folder, `python -I`. It is a fence
against accidents and idle cheating, not against an attacker: the processes have the user id of the function and see
its files. Run untrusted models in a pod with a read-only file system, a pid limit and nothing worth stealing.
"""

import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhfless_functions.rewards import reaper
from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.groups import RewardGroup

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_LONGEST_REPORT = 2**20
_CODE_RUNNER = Path(__file__).with_name("code_runner.py")


def code_scorer(tests_column: str, seconds: float, memory: int, scratch: str) -> Scorer:
    """The share of the unit tests that a response's last Python code block passes.

    A response without a code block scores 0. After a test that ran out of time the rest count as failed too.

    Args:
        tests_column: column with a list (or the JSON of one) of assert statements, run after the code, or of
            {input, output} for programs that read standard input; outputs are compared without trailing whitespace.
        seconds: time limit of one test, and of running the code itself.
        memory: bytes that all tests running at a time may use together.
        scratch: folder for working folders.
    """
    width = len(os.sched_getaffinity(0))
    runner = ThreadPoolExecutor(width)
    share = memory // (width + 1)

    def score(group: RewardGroup, call: Call) -> list[float]:
        tests = unit_tests(group.columns, tests_column)

        def one(completion: str) -> float:
            code = last_code_block(completion)
            if code is None:
                return 0.0
            with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as folder:
                passed = _run(code, tests, seconds, share, Path(folder))
            return passed / len(tests)

        scores = list(runner.map(one, group.completions))
        # What left its process group is an orphan by now, and this process its parent.
        reaper.end_descendants()
        return scores

    return score


def last_code_block(text: str) -> str | None:
    """The content of the last closed Markdown code block marked as Python or not marked."""
    blocks: list[str] = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def unit_tests(columns: dict[str, Any], name: str) -> list[str] | list[dict[str, str]]:
    """The tests of one prompt.

    Raises:
        LookupError: if the data has none, or in no form that is known.
    """
    tests = columns.get(name)
    if isinstance(tests, str):
        with contextlib.suppress(ValueError):
            tests = json.loads(tests)
    if isinstance(tests, list) and tests:
        if all(isinstance(test, str) for test in tests):
            return tests
        if all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
            return tests
    raise LookupError(
        f"column {name!r} must hold a list of assert statements or of {{input, output}}, but holds {tests!r:.80};"
        " set code.testsColumn to the column of the tests"
    )


def longest_call(columns: dict[str, Any], name: str, seconds: float, responses: int) -> float:
    """Seconds that testing the responses to one prompt takes at most, one after the other."""
    try:
        return (len(unit_tests(columns, name)) + 1) * seconds * responses
    except LookupError:
        return 0.0


def _run(code: str, tests: list[Any], seconds: float, memory: int, folder: Path) -> int:
    (folder / "solution.py").write_text(code)
    if isinstance(tests[0], str):
        return _run_asserts(tests, seconds, memory, folder)
    passed = 0
    for test in tests:
        result = _run_program(test, seconds, memory, folder)
        if result is None:
            break
        passed += result
    return passed


def _run_program(test: dict[str, str], seconds: float, memory: int, folder: Path) -> bool | None:
    """Whether the program answers right; None if it took too long."""
    (folder / "input").write_text(str(test["input"]))
    # A file, unlike a pipe, ends a flood of output by itself.
    with (folder / "input").open() as given, (folder / "output").open("w+") as answer:
        process = _start("program", memory, folder, stdin=given, stdout=answer)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
        answer.seek(0)
        return code == 0 and _lines(answer.read()) == _lines(str(test["output"]))


def _run_asserts(tests: list[str], seconds: float, memory: int, folder: Path) -> int:
    """How many tests pass. Passing is told by a word that the code does not know, not by an exit status."""
    word = secrets.token_hex(16)
    reading, writing = os.pipe()
    try:
        process = _start(
            "asserts", memory, folder, str(writing), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, keep=writing
        )
    finally:
        os.close(writing)
    heard = ""
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps({"word": word, "tests": tests}).encode())
        deadline = time.monotonic() + seconds
        while f"{word} end" not in heard and len(heard) < _LONGEST_REPORT:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([reading], [], [], remaining)[0]:
                break
            piece = os.read(reading, 65536).decode(errors="replace")
            if not piece:
                break
            # Each test has its own time: its end starts the next one's.
            deadline = time.monotonic() + seconds if word in piece else deadline
            heard += piece
    finally:
        _end(process)
        os.close(reading)
    return len({line for line in heard.splitlines() if line.startswith(f"{word} passed ")})


def _start(
    mode: str, memory: int, folder: Path, *arguments: str, stdin: Any, stdout: Any, keep: int | None = None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", str(_CODE_RUNNER), mode, str(memory), *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"},
        pass_fds=() if keep is None else (keep,),
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
