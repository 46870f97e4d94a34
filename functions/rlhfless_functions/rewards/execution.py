"""Unit tests of the code in a response, each in a process of its own.

The code is confined: it has no network (a namespace of its own if the kernel permits one, and in any case only Unix
sockets), limits on memory, time and written bytes, an empty environment and working folder, `python -I`, and no access
to other processes. It does not see its tests: see `code_judge`, and docs/security.md for what remains possible. This
protects against accidents and cheating, not against an attacker: the processes have the user id of the function and see
its files. Run untrusted models in a pod with a read-only file system, a pid limit and nothing worth stealing.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfless_functions.rewards import reaper
from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.checks import count
from rlhfless_functions.rewards.groups import RewardGroup

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_CODE_RUNNER = Path(__file__).with_name("code_runner.py")
_CODE_JUDGE = Path(__file__).with_name("code_judge.py")


@dataclass
class _Verdict:
    """The test results of one response."""

    passed: int = 0
    late: bool = False
    """Whether a test ran out of time."""


def code_scorer(tests_column: str, seconds: float, memory: int, scratch: str) -> Scorer:
    """Score the share of the unit tests that a response's last Python code block passes.

    A response without a code block scores 0. A test that runs out of time fails; the tests after it still run.

    Args:
        tests_column: column with a list (or the JSON of one) of assert statements, run after the code, or of {input,
            output} for programs that read standard input; outputs are compared without trailing whitespace.
        seconds: time limit of one test, and of running the code itself.
        memory: bytes that all tests running at a time may use together.
        scratch: folder for working folders.
    """
    width = len(os.sched_getaffinity(0))
    runner = ThreadPoolExecutor(width)
    share = memory // (width + 1)

    def score(group: RewardGroup, call: Call) -> list[float]:
        tests = unit_tests(group.columns, tests_column)

        def one(completion: str) -> tuple[float, str | None]:
            code = last_code_block(completion)
            if code is None:
                return 0.0, None
            try:
                with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as folder:
                    verdict = _run(code, tests, seconds, share, Path(folder))
            except (OSError, ValueError):
                # It used up the disk or the processes, replaced its folder, or is not text.
                traceback.print_exc()
                return 0.0, "crashed"
            return verdict.passed / len(tests), "timed_out" if verdict.late else None

        scored = list(runner.map(one, group.completions))
        for _, fate in scored:
            count(call, fate)
        # Processes that left the process group are orphans now, and this process is their parent.
        reaper.end_descendants()
        return [score for score, _ in scored]

    return score


def last_code_block(text: str) -> str | None:
    """Return the content of the last closed Markdown code block marked as Python or not marked."""
    blocks: list[str] = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def unit_tests(columns: dict[str, Any], name: str) -> list[str] | list[dict[str, str]]:
    """Return the tests of one prompt.

    Raises:
        LookupError: the data has no tests, or they have an unknown form.
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
    """Return the most seconds to test the responses to one prompt, one after the other.

    After a test that hangs, the code runs again, which may take as long once more.
    """
    try:
        return 2 * len(unit_tests(columns, name)) * seconds * responses
    except LookupError:
        return 0.0


def _run(code: str, tests: list[Any], seconds: float, memory: int, folder: Path) -> _Verdict:
    (folder / "solution.py").write_text(code)
    if isinstance(tests[0], str):
        return _run_asserts(tests, seconds, memory, folder)
    verdict = _Verdict()
    for test in tests:
        result = _run_program(test, seconds, memory, folder)
        verdict.passed += bool(result)
        verdict.late |= result is None
    return verdict


def _run_program(test: dict[str, str], seconds: float, memory: int, folder: Path) -> bool | None:
    """Return whether the program answers correctly; None if it took too long."""
    (folder / "input").write_text(str(test["input"]))
    # A file limits a flood of output; a pipe does not.
    with (folder / "input").open() as given, (folder / "output").open("w+b") as answer:
        process = _start(_CODE_RUNNER, "program", memory, folder=folder, stdin=given, stdout=answer)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
        answer.seek(0)
        said = answer.read().decode(errors="replace")
        return code == 0 and _lines(said) == _lines(str(test["output"]))


def _run_asserts(tests: list[str], seconds: float, memory: int, folder: Path) -> _Verdict:
    """Run the tests in a judge's process, and the code in another one, which answers only the judge."""
    verdict, first = _Verdict(), 0
    while first < len(tests):
        told, late = _judge(tests, first, seconds, memory, folder)
        verdict.passed += sum(line.startswith("passed ") for line in told)
        verdict.late |= late
        if "loaded" not in told or "end" in told:
            break
        # The test at which the judge stopped has failed; the rest get processes of their own.
        first += len(told)
    return verdict


def _judge(tests: list[str], first: int, seconds: float, memory: int, folder: Path) -> tuple[list[str], bool]:
    """Return the judge's verdicts on the tests from `first` on, and whether one ran out of time."""
    verdicts, judges_end = socket.socketpair()
    questions, codes_end = socket.socketpair()
    processes = []
    told: list[str] = []
    try:
        with judges_end, questions, codes_end:
            ends = questions.fileno(), judges_end.fileno()
            processes.append(_start(_CODE_JUDGE, memory, *ends, folder=folder, keep=ends))
            end = codes_end.fileno()
            processes.append(_start(_CODE_RUNNER, "asserts", memory, end, folder=folder, keep=(end,)))
        # Each line restarts the time for the next test.
        verdicts.settimeout(seconds)
        while "end" not in told:
            piece = verdicts.recv(65536).decode(errors="replace")
            if not piece:
                break
            if piece == "hidden\n":
                verdicts.sendall(f"{json.dumps({'first': first, 'tests': tests})}\n".encode())
            else:
                told += piece.splitlines()
    except TimeoutError:
        return told, True
    except ConnectionError:
        return told, False
    finally:
        for process in processes:
            _end(process)
        verdicts.close()
    return told, False


def _start(
    script: Path, *arguments: object, folder: Path, stdin: Any = subprocess.DEVNULL, stdout: Any = subprocess.DEVNULL,
    keep: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-I", str(script), *map(str, arguments)],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"},
        pass_fds=keep,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
