"""The processes that run the code of one response and its tests, and their limits.

The code is confined: see `confinement` for its files, `seccomp` for its calls, and `keeper` for its processes. It has
limits on memory, time and written bytes, an empty environment and working folder, `python -I`, no network and no access
to other processes. It does not see its tests: see `judge`, and docs/security.md for what remains possible.

Nothing here opens a file in the folder once the code has run: it may have put anything there.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfless_functions.data.code_tests import CodeTests
from rlhfless_functions.rewards.code.confinement import Confinement
from rlhfless_functions.rewards.code.printed import same_output
from rlhfless_functions.rewards.code.runner import NOT_BEGUN, OUT_OF_MEMORY, WRITTEN_BYTES
from rlhfless_functions.rewards.code.time_limit import TimeLimit

_RUNNER = Path(__file__).with_name("runner.py")
_JUDGE = Path(__file__).with_name("judge.py")
_LEAST_MEMORY = 512 * 2**20
"""Bytes that the code of one response may use at least, unless all together have less: enough for NumPy and pandas."""
_SPARE_BYTES = 2**20
"""Bytes that a program may print besides the wanted ones, such as spaces."""
_PATIENCE = 5.0
"""Seconds in which a program's keeper ends all processes; then it is killed itself."""
_STARTS = 5
"""Attempts to start a program that does not begin."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
"""Libraries for mathematics reserve memory for each core when they are imported. On a machine with many cores, that is
more than the limit."""


class NotBegunError(Exception):
    """The machine does not start programs, so nothing is known of the code."""

    def __init__(self) -> None:
        super().__init__("the machine does not start the programs that are tested; has it processes and memory left?")


@dataclass
class Verdict:
    """The test results of one response."""

    passed: int = 0
    late: bool = False
    """True if a test ran out of time."""
    out_of_memory: bool = False
    """True if the code reached its limit of memory."""
    ended: bool = False
    """True if the code's process was killed, ended itself in a test, or wrote more than it may."""

    @property
    def fate(self) -> str | None:
        """The limit at which the code failed, as it is counted; None if it reached none."""
        if self.late:
            return "timed_out"
        return "out_of_memory" if self.out_of_memory else "crashed" if self.ended else None


def shares_of(cores: int, memory: int) -> tuple[int, int]:
    """Return how many responses are tested at a time, and the bytes of memory for the code of each.

    There are as many as cores, but no more than the memory has room for.
    """
    width = max(1, min(cores, memory // _LEAST_MEMORY))
    return width, memory // width


def run_tests(
    code: str, tests: CodeTests, before: str, seconds: float, memory: int, folder: Path, confinement: Confinement
) -> Verdict:
    """Run tests of a code in an empty folder.

    Args:
        code: Python text.
        tests: its tests.
        before: text that runs before the code; its errors don't count.
        seconds: limit of one test, and of running the code itself; see `time_limit`.
        memory: limit of a process in bytes.
        folder: the working folder.
        confinement: what the code may do.

    Raises:
        NotBegunError: the code does not begin.
    """
    (folder / "solution.py").write_text(code)
    if tests.units and before:
        (folder / "before.py").write_text(before)
    verdict = Verdict()
    with confinement.arguments(folder) as (rules, confined):
        runner = _Runner(memory, folder, rules, confined)
        if tests.units:
            _run_units(tests.units, seconds, runner, verdict)
        for given, wanted in tests.programs:
            if not any(_run_program(given, wanted, seconds, runner, verdict) for _ in range(_STARTS)):
                raise NotBegunError
    return verdict


@dataclass
class _Runner:
    """Starts a code."""

    memory: int
    folder: Path
    rules: int
    """Descriptor of Landlock's rules; -1 without."""
    confined: tuple[object, ...]
    """Arguments about them."""

    def start(self, mode: str, keep: tuple[int, ...] = (), **streams: Any) -> subprocess.Popen[bytes]:
        rules = (self.rules,) if self.rules >= 0 else ()
        arguments = (mode, self.memory, *self.confined, *keep)
        return _start(_RUNNER, *arguments, folder=self.folder, keep=(*rules, *keep), **streams)


def _run_program(given: str, wanted: str, seconds: float, runner: _Runner, verdict: Verdict) -> bool:
    """Run the code as a program; return whether it began."""
    # Files limit a flood of output; pipes do not. These have no names that the code could give to others.
    with tempfile.TemporaryFile(dir=runner.folder) as stdin, tempfile.TemporaryFile(dir=runner.folder) as answer:
        stdin.write(given.encode())
        stdin.seek(0)
        process = runner.start("program", stdin=stdin, stdout=answer)
        limit = TimeLimit([process], seconds)
        try:
            while (status := _waited(process, limit.left())) is None:
                if limit.is_over():
                    verdict.late = True
                    return True
        finally:
            _end(process)
        if status == NOT_BEGUN:
            return False
        size = os.fstat(answer.fileno()).st_size
        verdict.out_of_memory |= status == OUT_OF_MEMORY
        verdict.ended |= status < 0 or size >= WRITTEN_BYTES
        if status == 0 and size <= 2 * len(wanted.encode()) + _SPARE_BYTES:
            answer.seek(0)
            verdict.passed += same_output(answer.read(size).decode(errors="replace"), wanted)
        return True


def _run_units(units: list[dict[str, Any]], seconds: float, runner: _Runner, verdict: Verdict) -> None:
    """Run the tests in a judge's process, and the code in another one, which answers only the judge."""
    first = starts = 0
    while first < len(units):
        try:
            told, late = _judge(units, first, seconds, runner, verdict)
        except NotBegunError:
            starts += 1
            if starts < _STARTS:
                continue
            raise
        words = [line.split() for line in told]
        verdict.passed += sum(line[0] == "passed" for line in words)
        verdict.late |= late
        verdict.out_of_memory |= any("memory" in line for line in words)
        verdict.ended |= any("gone" in line for line in words)
        if "loaded" not in told or "end" in told:
            break
        # The test at which the judge stopped has failed; the rest get processes of their own.
        first += len(told)


def _judge(
    units: list[dict[str, Any]], first: int, seconds: float, runner: _Runner, verdict: Verdict
) -> tuple[list[str], bool]:
    """Return the judge's verdicts on the tests from `first` on, and whether one ran out of time.

    Raises:
        NotBegunError: the code did not begin.
    """
    verdicts, judges_end = socket.socketpair()
    questions, codes_end = socket.socketpair()
    processes = []
    told: list[str] = []
    try:
        with judges_end, questions, codes_end:
            ends = questions.fileno(), judges_end.fileno()
            processes.append(_start(_JUDGE, runner.memory, *ends, folder=runner.folder, keep=ends))
            processes.append(runner.start("asserts", (codes_end.fileno(),)))
        limit = TimeLimit(processes, seconds)
        while "end" not in told:
            verdicts.settimeout(limit.left())
            try:
                piece = verdicts.recv(65536).decode(errors="replace")
            except TimeoutError:
                if limit.is_over():
                    return told, True
                continue
            if not piece:
                break
            # Each line restarts the time for the next test.
            limit.renew()
            if piece == "hidden\n":
                verdicts.sendall(f"{json.dumps({'first': first, 'tests': units})}\n".encode())
            else:
                told += piece.splitlines()
    except ConnectionError:
        pass
    finally:
        for process in processes[:1]:
            _kill(process)
        for process in processes[1:]:
            _end(process)
            # The keeper says it of a code that was killed, even between two tests.
            verdict.ended |= process.returncode < 0 and process.returncode != -signal.SIGTERM
        verdicts.close()
    if processes[1].returncode == NOT_BEGUN:
        raise NotBegunError
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
        env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8", **_ONE_THREAD},
        pass_fds=keep,
        start_new_session=True,
    )


def _waited(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return a process's exit status; None if it has not ended after these seconds."""
    # `wait` would look at the clock, up to 50 ms too late. Some sandboxes have no pidfd_open.
    with contextlib.suppress(OSError):
        ended = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll(1000 * seconds)
            seconds = 0
        finally:
            os.close(ended)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """Let a keeper end its program."""
    if keeper.returncode is not None:
        return
    keeper.terminate()
    if _waited(keeper, _PATIENCE) is None:
        _kill(keeper)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
