"""Checks of responses in a process that can be killed: a response can only hold up its own check.

A check that takes long, uses much memory or ends its process scores 0 and is counted; the rest go on in a fresh fork.
"""

import contextlib
import os
import resource
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlhfless_functions.rewards.calls import Call
from rlhfless_functions.runtime.processes import die_with_parent

WAIT_FACTOR = 10
"""How much longer than its limit of processor time a check may take, where the machine is busy or out of memory."""

_SCORE = struct.Struct("=d")
_LEAST_MEMORY = 64 * 2**20
"""Bytes that a check may use even where its worker fills its limit already."""


def check_each(check: Callable[[int], float], numbers: Sequence[int], seconds: float, call: Call) -> dict[int, float]:
    """What a check says of each response.

    Args:
        check: scores one response by its number; what it changes is lost.
        numbers: of the responses to check.
        seconds: processor time of one check, which does not depend on how busy the machine is.
        call: counts what was given up: `timed_out` and `crashed`, 1 or 0 for each response.
    """
    scores: dict[int, float] = {}
    while len(scores) < len(numbers):
        left = [number for number in numbers if number not in scores]
        fate = None
        for number, answer in zip(left, _answers_of_a_fork(check, left, seconds), strict=False):
            scores[number], fate = (answer, None) if isinstance(answer, float) else (0.0, answer)
            count(call, fate)
    return scores


def count(call: Call, fate: str | None) -> None:
    """Count a response whose check came to its end (None), `timed_out` or `crashed`."""
    for name in ("timed_out", "crashed"):
        call.metrics.append((name, float(fate == name)))


def _answers_of_a_fork(check: Callable[[int], float], numbers: Sequence[int], seconds: float) -> Iterator[float | str]:
    """Scores as long as the fork lives, then what became of it."""
    parent = os.getpid()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(parent)
            _limit_memory()
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            for number in numbers:
                # The kernel ends the process, even inside a call that never returns to Python.
                signal.setitimer(signal.ITIMER_PROF, seconds)
                os.write(writing, _SCORE.pack(check(number)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    late = False
    try:
        for _ in numbers:
            answer = _read(reading, time.monotonic() + WAIT_FACTOR * seconds)
            if not isinstance(answer, bytes):
                late = answer is None
                break
            yield _SCORE.unpack(answer)[0]
        else:
            return
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    by_clock = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    yield "timed_out" if late or by_clock else "crashed"


def _read(descriptor: int, deadline: float) -> bytes | bool | None:
    """A score; False once the other side has ended, None where it is late."""
    ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        return None
    # Less than a pipe writes at once, so it comes whole.
    return os.read(descriptor, _SCORE.size) or False


def _limit_memory() -> None:
    """Limit this fork to what its worker's limit leaves: the fork reaches its limit before the worker does."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY:
        return
    pages = [int(count) * resource.getpagesize() for count in Path("/proc/self/statm").read_text().split()]
    resident, data = pages[1], pages[5]
    own = min(limit, data + max(_LEAST_MEMORY, limit - 3 * resident))
    resource.setrlimit(resource.RLIMIT_DATA, (own, own))
